"""Grammars of forced calls: what may come under them is what the readers of calls take, in every style."""

import json
from collections.abc import Collection
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import Tokenizer

from cluster.errors import GrammarError
from cluster.grammar import GrammarCompiler, grammar_text
from router_service.answer_reading import AnswerReading, ToolReading
from router_service.call_grammar import CallGrammar
from router_service.model_parsers import BY_TEMPLATE, ModelParsers, ParserNames, choose_parsers
from router_service.reasoning import ReasoningStart
from router_service.said import Said, joined
from router_service.template_probes import PROBE_CALL_ID
from router_service.tokenizer import TextCodec
from tests.helpers.chat_templates import (
    DEEPSEEK_R1,
    MISTRAL,
    MISTRAL_ARGS,
    NAMED,
    QWEN3,
    make_template,
)
from tests.helpers.schemas import random_object_schema
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR
from tests.router_service.tool_calls.reading import Offered
from tests.router_service.tool_calls.reading import calls as calls_of

VOCAB_SIZE, EOS = 3072, (2, 0)
CODEC = TextCodec(DEMO_MODEL_DIR)
TOKENIZER = json.loads((DEMO_MODEL_DIR / "tokenizer.json").read_text())
BARE = {**TOKENIZER, "added_tokens": [t for t in TOKENIZER["added_tokens"] if t["id"] in EOS]}
"""The same, whose markers are no tokens of their own."""
INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEMPLATES = {
    "hermes": QWEN3,
    "deepseek": DEEPSEEK_R1,
    "mistral": MISTRAL,
    "mistral args": MISTRAL_ARGS,
}
STYLES = {name: choose_parsers(BY_TEMPLATE, make_template(s)) for name, s in TEMPLATES.items()}
WITHOUT_TEMPLATE = {
    f"{name} untold": choose_parsers(ParserNames(tool_calls=name), make_template(NAMED))
    for name in ("hermes", "deepseek", "mistral")
}
ALL_STYLES = STYLES | WITHOUT_TEMPLATE
each_style = pytest.mark.parametrize("style", ALL_STYLES.values(), ids=ALL_STYLES.keys())


class Vocabulary:
    def __init__(self, description: dict[str, Any]) -> None:
        text = json.dumps(description)
        self.tokenizer = Tokenizer.from_str(text)
        self.compiler = GrammarCompiler(text, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
        added = self.tokenizer.get_added_tokens_decoder()
        self.never_cut = {token.content: token_id for token_id, token in added.items()}

    def accepts(self, grammar: str, text: str) -> bool | None:
        """Whether the answer may end behind the text; None where the text cannot come."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        state = self.compiler.start(grammar_text("lark", grammar))
        try:
            return bool(state.allowed_after(np.array(ids, np.int32))[EOS[0]])
        except GrammarError:
            return None


MARKED, UNMARKED = Vocabulary(TOKENIZER), Vocabulary(BARE)
each_vocabulary = pytest.mark.parametrize("vocabulary", [MARKED, UNMARKED], ids=["marked", "bare"])


def grammar_of(
    style: ModelParsers,
    schemas: dict[str, dict[str, Any]],
    *,
    vocabulary: Vocabulary = MARKED,
    is_repeated: bool = True,
    reasoning: ReasoningStart | None = None,
) -> str:
    assert style.call_layout is not None
    grammar = CallGrammar(style.call_layout, vocabulary.never_cut, reasoning)
    return grammar.text(schemas, is_repeated=is_repeated)


def written(style: ModelParsers, *calls: tuple[str, str]) -> str:
    layout = style.call_layout
    assert layout is not None
    texts = [f"{name}{layout.between}{arguments}" for name, arguments in calls]
    return f"{layout.head}{layout.separator.join(texts)}{layout.tail}"


def told(
    style: ModelParsers, token_ids: list[int], names: Collection[str]
) -> tuple[list[Said], Said]:
    """Of an answer: token by token, and from its text at once."""
    assert style.call_format is not None
    reading = AnswerReading(tools=ToolReading(style.call_format, Offered(names)))
    detokenizer, reader = CODEC.detokenizer(reading.markers), reading.reader()
    texts = [*map(detokenizer.add, token_ids), detokenizer.finish()]
    streamed = [*map(reader.add, texts), reader.finish()]
    at_once = reading.reader()
    return streamed, joined([at_once.add("".join(texts)), at_once.finish()])


def read(
    style: ModelParsers, token_ids: list[int], names: Collection[str]
) -> list[tuple[str, str]]:
    """Calls of these functions of an answer that is nothing else."""
    _, said = told(style, token_ids, names)
    assert said.text == ""
    return calls_of(said)


def walked(grammar: str, rng: np.random.Generator, max_calls: int) -> list[int]:
    """Random tokens that may come, up to the end of sequence; it is taken where the answer is long enough."""
    state = MARKED.compiler.start(grammar_text("lark", grammar))
    output: list[int] = []
    while True:
        allowed = np.flatnonzero(state.allowed_after(np.array(output, np.int32)))
        if EOS[0] in allowed and (len(output) > 40 * max_calls or len(allowed) == len(EOS)):
            return output
        output.append(int(rng.choice(np.setdiff1d(allowed, EOS))))


@each_style
@pytest.mark.parametrize("seed", range(2))
def test_random_answers_are_calls_whose_arguments_match_random_schemas(
    style: ModelParsers, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    schemas = {f"f-{number}": random_object_schema(rng) for number in range(3)}
    for is_repeated in (True, False):
        grammar = grammar_of(style, schemas, is_repeated=is_repeated)
        token_ids = walked(grammar, rng, max_calls=2)
        calls = read(style, token_ids, schemas)
        assert len(calls) == 1 or (is_repeated and len(calls) > 1)
        for name, arguments in calls:
            assert jsonschema_rs.validator_for(schemas[name]).is_valid(json.loads(arguments))
        for end in (len(token_ids), *rng.integers(0, len(token_ids), 5)):
            assert_streamed_as_whole(style, token_ids[:end], schemas)


def assert_streamed_as_whole(
    style: ModelParsers, token_ids: list[int], names: Collection[str]
) -> None:
    streamed, whole = told(style, token_ids, names)
    parts = [part for said in streamed for part in said.calls]
    heads = [number for number, part in enumerate(parts) if part.head is not None]
    ends = [*heads[1:], None][: len(heads)]
    for call, start, end in zip(whole.tool_calls, heads, ends, strict=True):
        assert "".join(part.arguments for part in parts[start:end]) == call.arguments
    assert [part.ends for part in joined(streamed).calls] == [c.is_whole for c in whole.tool_calls]
    assert joined(streamed).text == whole.text


@each_style
@each_vocabulary
def test_one_call_may_end_the_answer_and_a_second_may_follow_where_several_are_wanted(
    style: ModelParsers, vocabulary: Vocabulary
) -> None:
    schemas = {"f": INTEGER, "g": INTEGER}
    one, two = (written(style, *[("g", '{"a": -5}')] * n) for n in (1, 2))
    several = grammar_of(style, schemas, vocabulary=vocabulary)
    single = grammar_of(style, schemas, vocabulary=vocabulary, is_repeated=False)
    assert vocabulary.accepts(several, "") is False
    assert vocabulary.accepts(several, one) is vocabulary.accepts(several, two) is True
    assert vocabulary.accepts(single, one) is True
    assert vocabulary.accepts(single, two) is None


@each_style
@each_vocabulary
def test_nothing_else_may_come(style: ModelParsers, vocabulary: Vocabulary) -> None:
    grammar = grammar_of(style, {"f": INTEGER}, vocabulary=vocabulary)
    for text in (
        "Well, ",
        written(style, ("h", '{"a": 5}')),
        written(style, ("f", '{"a": "5"}')),
        written(style, ("f", "{}")),
        written(style, ("f", '{"a": 5}')) + " and",
        "<think>",
    ):
        assert vocabulary.accepts(grammar, text) is None


def test_an_id_is_written_or_left_out_where_a_template_shows_one() -> None:
    style = STYLES["mistral"]
    text = written(style, ("f", '{"a": 5}'), ("f", '{"a": 6}'))
    assert text.count(f', "id": "{PROBE_CALL_ID}"') == 2
    grammar = grammar_of(style, {"f": INTEGER})
    assert MARKED.accepts(grammar, text.replace(PROBE_CALL_ID, "aB3456789")) is True
    assert MARKED.accepts(grammar, text.replace(f', "id": "{PROBE_CALL_ID}"', "")) is True
    assert MARKED.accepts(grammar, text.replace(PROBE_CALL_ID, "short")) is None


@each_vocabulary
@pytest.mark.parametrize(
    "style", [STYLES["hermes"], STYLES["deepseek"]], ids=["hermes", "deepseek"]
)
def test_reasoning_comes_before_a_call_where_the_prompt_or_the_answer_has_begun_it(
    style: ModelParsers, vocabulary: Vocabulary
) -> None:
    call = written(style, ("f", '{"a": 5}'))
    thoughts = ["a < b\n</think>\n\n", "</think>", "<think>\n{}</think>"]
    expected = {
        ReasoningStart.OUTSIDE: [True, None, None, None],
        ReasoningStart.IF_OPENED: [True, None, None, True],
        ReasoningStart.INSIDE: [False, True, True, True],
    }
    for start, may_end in expected.items():
        grammar = grammar_of(style, {"f": INTEGER}, vocabulary=vocabulary, reasoning=start)
        texts = [call, *(thought + call for thought in thoughts)]
        told = [vocabulary.accepts(grammar, text) or None for text in texts]
        assert told == [end or None for end in may_end]


def test_line_breaks_between_reasoning_and_call_have_an_end() -> None:
    grammar = grammar_of(
        STYLES["hermes"], {"f": INTEGER}, reasoning=ReasoningStart.INSIDE, is_repeated=False
    )
    assert MARKED.accepts(grammar, "x</think>\n\n\n") is False
    assert MARKED.accepts(grammar, "x</think>\n\n\n\n") is None


def test_the_layout_is_that_of_the_template() -> None:
    spaced = QWEN3.replace('"arguments": \'', '"arguments":  \'')
    style = choose_parsers(BY_TEMPLATE, make_template(spaced))
    assert style.call_layout is not None
    assert style.call_layout.between == '", "arguments":  '


def test_a_template_that_cannot_show_two_calls_leaves_the_layout_of_the_format() -> None:
    single = "{%- if messages[1] and messages[1].tool_calls | length > 1 %}{{ raise_exception('one') }}{%- endif %}"
    style = choose_parsers(BY_TEMPLATE, make_template(single + QWEN3))
    assert style.call_format_name == "hermes"
    assert style.call_format is not None
    assert style.call_layout == style.call_format.layout


@each_style
def test_every_layout_is_read_back(style: ModelParsers) -> None:
    text = written(style, ("f", '{"a": 5}'), ("g", "{}"))
    ids = CODEC.encode(text, add_special_tokens=False)
    assert read(style, ids, "fg") == [("f", '{"a": 5}'), ("g", "{}")]
