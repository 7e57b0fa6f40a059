"""Masks of grammars over the demo model's tokens."""

import json
import re

import numpy as np
import pytest
from tokenizers import Tokenizer

from cluster.errors import GrammarError
from cluster.grammar import (
    MAX_KEPT_GRAMMARS,
    GrammarCompiler,
    GrammarKind,
    GrammarState,
    grammar_text,
    load_grammar_compiler,
)
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

VOCAB_SIZE, EOS = 3072, (2, 0)
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
MODEL = json.loads(TOKENIZER.to_str())
UNMERGED = {**MODEL, "model": {**MODEL["model"], "ignore_merges": True}}
"""Takes a word as a whole wherever the vocabulary has it."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return load_grammar_compiler(DEMO_MODEL_DIR, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)


@pytest.fixture(scope="module", params=[MODEL, UNMERGED], ids=["merges", "ignores merges"])
def either_compiler(request: pytest.FixtureRequest) -> GrammarCompiler:
    text = json.dumps(request.param)
    return GrammarCompiler(text, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)


def started(compiler: GrammarCompiler, kind: GrammarKind, source: object) -> GrammarState:
    text = source if isinstance(source, str) else json.dumps(source)
    return compiler.start(grammar_text(kind, text))


def ids_of(text: str) -> np.ndarray:
    return np.array(TOKENIZER.encode(text, add_special_tokens=False).ids, np.int32)


def texts_after(state: GrammarState, text: str) -> set[str]:
    allowed = np.flatnonzero(state.allowed_after(ids_of(text))).tolist()
    return {TOKENIZER.id_to_token(token_id) for token_id in allowed}


END = {TOKENIZER.id_to_token(token_id) for token_id in EOS}


def walked(state: GrammarState, seed: int, num_tokens: int = 60) -> list[int]:
    """Random tokens that may come, each asked for with all before it."""
    rng, output = np.random.default_rng(seed), []
    while len(output) < num_tokens and (not output or output[-1] not in EOS):
        allowed = np.flatnonzero(state.allowed_after(np.array(output, np.int32)))
        output.append(int(rng.choice(allowed)))
    return output


def test_end_of_sequence_comes_where_the_grammar_accepts_and_alone_at_its_end(
    compiler: GrammarCompiler,
) -> None:
    def after(text: str) -> set[str]:
        return texts_after(started(compiler, "regex", "ab?c?"), text)

    assert after("a") == {"b", "c"} | END
    assert after("ac") == END
    assert not after("") & END


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json", {"type": "object"}),
        ("regex", r"([a-f]{1,5}\d+ ){1,4}"),
        ("grammar", 'start: word+\nword: "x" word? "y"'),
    ],
)
def test_masks_are_those_of_the_tokens_whatever_was_asked_before(
    kind: GrammarKind, source: object, seed: int, compiler: GrammarCompiler
) -> None:
    """In order, rebuilt from all tokens at once, and after going back."""
    output = walked(started(compiler, kind, source), seed, num_tokens=30)
    steps = [np.array(output[:end], np.int32) for end in range(len(output))]
    state = started(compiler, kind, source)
    in_order = [state.allowed_after(step) for step in steps]
    rebuilt = [started(compiler, kind, source).allowed_after(step) for step in steps]
    backwards = [state.allowed_after(step) for step in reversed(steps)][::-1]
    np.testing.assert_array_equal(in_order, rebuilt)
    np.testing.assert_array_equal(in_order, backwards)


def test_texts_under_one_grammar_do_not_know_of_each_other(compiler: GrammarCompiler) -> None:
    first, second = (started(compiler, "regex", "[a-c][x-z]") for _ in range(2))
    assert texts_after(first, "b") == {"x", "y", "z"}
    assert {"a", "b", "c"} <= texts_after(second, "")


@pytest.mark.parametrize("options", [["yes", "no"], ['a"b\\', "né\n"], ["😀", "#'%"], ["", "x"]])
def test_each_of_the_options_of_a_choice_can_come(
    options: list[str], compiler: GrammarCompiler
) -> None:
    for option in options:
        assert texts_after(started(compiler, "choice", options), option) >= END


def test_special_tokens_and_padding_never_come_as_text(compiler: GrammarCompiler) -> None:
    special = {"<|im_start|>"}
    assert not texts_after(started(compiler, "regex", "(.|\n)*"), "a") & special


def greedy_text(state: GrammarState) -> str:
    """Of the highest ids that may come, up to the end of sequence."""
    output: list[int] = []
    while True:
        token_id = int(np.flatnonzero(state.allowed_after(np.array(output, np.int32)))[-1])
        if token_id in EOS:
            return str(TOKENIZER.decode(output))
        output.append(token_id)


MARKERS = ["<think>", "<tool_call>", "<|im_end|>", "a<think>b", "<think><|im_start|>é"]


@pytest.mark.parametrize("text", MARKERS)
@pytest.mark.parametrize("kind", ["choice", "regex", "json", "grammar"])
def test_text_that_spells_a_special_token_comes_as_ordinary_tokens(
    kind: GrammarKind, text: str, either_compiler: GrammarCompiler
) -> None:
    source = {
        "choice": [text],
        "regex": re.escape(text),
        "json": {"enum": [text]},
        "grammar": f"start: {json.dumps(text)}",
    }[kind]
    expected = json.dumps(text, ensure_ascii=False) if kind == "json" else text
    assert greedy_text(started(either_compiler, kind, source)) == expected


@pytest.mark.parametrize("name", ["<think>", "<[7]>"])
def test_a_special_token_comes_where_a_grammar_names_it(
    name: str, compiler: GrammarCompiler
) -> None:
    state = started(compiler, "lark", f'start: {name} "x"')
    assert texts_after(state, "") == {"<think>"}
    assert texts_after(state, "<think>") == {"x"}


def test_padding_never_comes() -> None:
    padded = VOCAB_SIZE + 8
    compiler = load_grammar_compiler(DEMO_MODEL_DIR, vocab_size=padded, eos_token_ids=EOS)
    allowed = started(compiler, "regex", r"(.|\n)*").allowed_after(ids_of("a"))
    assert len(allowed) == padded
    assert not allowed[VOCAB_SIZE:].any()


def test_blanks_between_tokens_of_json_have_an_end(compiler: GrammarCompiler) -> None:
    state = started(compiler, "json", {"type": "object"})
    assert texts_after(state, "{" + " " * 20) & {" ", "Ġ", "Ċ"} == set()
    assert texts_after(state, "{" + " " * 5) & {"Ġ", "Ċ"} != set()


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("json", {"type": "notatype"}, "notatype"),
        ("json", {"type": "string", "pattern": "(["}, "regex"),
        ("json", {"not": {"type": "object"}}, "not"),
        ("json", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json", {"$ref": "http://example.com/x"}, "example.com"),
        ("json", {"allOf": [{"type": "integer"}, {"type": "string"}]}, "Unsatisfiable"),
        ("json", {"enum": []}, "Unsatisfiable"),
        ("json", '{"a": NaN}', ""),
        ("regex", "([", "regex"),
        ("regex", "(?=a)b", "look-around"),
        ("grammar", "start: missing", "missing"),
        ("grammar", "root ::= ((", "GBNF"),
        ("grammar", "start: start", ""),
    ],
)
def test_what_cannot_be_followed_is_refused_with_a_short_reason(
    kind: GrammarKind, source: object, words: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(GrammarError) as refused:
        started(compiler, kind, source).allowed_after(np.zeros(0, np.int32))
    message = str(refused.value)
    assert words in message
    assert 0 < len(message) < 400
    assert "\n" not in message


def test_a_token_that_cannot_follow_is_an_error_for_good(compiler: GrammarCompiler) -> None:
    state = started(compiler, "regex", "abc")
    for _ in range(2):
        with pytest.raises(GrammarError):
            state.allowed_after(ids_of("x"))


def follow(state: GrammarState, text: str) -> None:
    for end in range(len(text)):
        state.allowed_after(ids_of(text[:end]))


def test_a_text_that_comes_to_a_limit_leaves_others_theirs(compiler: GrammarCompiler) -> None:
    """Copies of a matcher share what their lexer has grown by."""
    greedy, other = (started(compiler, "regex", "a{300000}") for _ in range(2))
    with pytest.raises(GrammarError, match="too many expressions"):
        follow(greedy, "aaaa")
    assert texts_after(other, "") == {"a"}


def test_what_one_namespace_has_compiled_is_not_kept_for_another() -> None:
    compiler = load_grammar_compiler(DEMO_MODEL_DIR, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    for namespace in ("one", "two", "one"):
        compiler.start(grammar_text("regex", "ab"), namespace)
    assert compiler.num_kept == 2


def test_only_so_many_grammars_are_kept(compiler: GrammarCompiler) -> None:
    states = [started(compiler, "regex", f"a{n}") for n in range(3 * MAX_KEPT_GRAMMARS)]
    assert compiler.num_kept == MAX_KEPT_GRAMMARS
    assert "1" in texts_after(states[1], "a")


@pytest.mark.parametrize(
    ("tokenizer", "eos_token_ids", "words"),
    [
        ("{}", EOS, "tokenizer"),
        (TOKENIZER.to_str(), (), "end-of-sequence"),
    ],
)
def test_a_model_with_which_no_grammar_can_be_followed_says_why(
    tokenizer: str, eos_token_ids: tuple[int, ...], words: str
) -> None:
    with pytest.raises(GrammarError, match=words):
        GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=eos_token_ids)
