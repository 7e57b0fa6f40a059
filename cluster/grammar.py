"""Grammars of structured output over one model's tokens: from text to the ids that may come next. Done by llguidance.

Declared here because the HTTP server's check and a rank's masks must have the same limits to mean the same.

Letter: V vocabulary.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, grammar_from

from cluster.errors import GrammarError
from cluster.grammar_tokens import grammar_tokens

GrammarKind = Literal["json", "regex", "choice", "grammar", "lark"]
MAX_KEPT_GRAMMARS = 64
"""Compiled ones of a process. What sequences use stays with them."""
_SHOWN_CHARACTERS = 300
_DEAD_END = "nothing can follow that would match"
ANSWER = "@answer"
"""What a preface names the grammar of the answer itself."""
BLANKS = r"[ \n\r\t]{1,20}"
"""A model that is fond of blanks gets on: so many between two tokens of JSON, and no more."""


class GrammarCompiler:
    """Owner of one vocabulary as grammars need it, and of the grammars compiled last. One thread, but `compiled`."""

    def __init__(
        self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Raises GrammarError: no grammar can be followed with this tokenizer."""
        if not eos_token_ids:
            raise GrammarError("the model has no end-of-sequence id, so that no answer could end")
        try:
            self._tokenizer = grammar_tokens(
                tokenizer_json, vocab_size=vocab_size, eos_token_ids=eos_token_ids
            )
        except ValueError as error:
            raise GrammarError(f"the model's tokenizer is not supported: {error}") from error
        self._vocab_size = vocab_size
        self._limits = LLParserLimits(step_lexer_fuel=50_000, verbose_errors=False)
        self._kept: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def start(self, grammar: str, namespace: str = "") -> "GrammarState":
        """A new text under a grammar as `grammar_text` makes it, that shares what was compiled with those of its
        namespace. Raises GrammarError."""
        return self.kept(grammar, namespace) or self.keep(
            grammar, namespace, self.compiled(grammar)
        )

    def kept(self, grammar: str, namespace: str) -> "GrammarState | None":
        """The same at once; None where it has to be compiled."""
        matcher = self._kept.get((namespace, grammar))
        return None if matcher is None else self.keep(grammar, namespace, matcher)

    def keep(self, grammar: str, namespace: str, matcher: LLMatcher) -> "GrammarState":
        """matcher: as `compiled` made it."""
        key = namespace, grammar
        self._kept[key] = matcher
        self._kept.move_to_end(key)
        while len(self._kept) > MAX_KEPT_GRAMMARS:
            self._kept.popitem(last=False)

        def apart() -> LLMatcher:
            self._kept.pop(key, None)
            return self.compiled(grammar)

        return GrammarState(matcher.deep_copy(), apart, self._vocab_size)

    def compiled(self, grammar: str) -> LLMatcher:
        """May take long, and may be called on any thread. Raises GrammarError."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        _check(matcher)
        return matcher


class _LimitError(GrammarError):
    """It might not have come to that in a matcher that shares nothing."""


class GrammarState:
    """How far one text has come. A function of its tokens: those that were there before are not looked at again."""

    def __init__(self, matcher: LLMatcher, apart: Callable[[], LLMatcher], vocab_size: int) -> None:
        """matcher: a copy, which shares the growth of its lexer, and so its limits, with others; apart: makes one that
        does not."""
        self._matcher = matcher
        self._apart: Callable[[], LLMatcher] | None = apart
        self._vocab_size = vocab_size
        self._num_tokens = 0

    def allowed_after(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """[V] True for ids that may follow these, which each could follow those before it; end of sequence where the
        grammar accepts, alone where nothing can follow. Raises GrammarError where a limit was reached, by this text
        alone."""
        try:
            return self._allowed_after(token_ids)
        except _LimitError:
            if self._apart is None:
                raise
            self._matcher, self._apart = self._apart(), None
            self._num_tokens = 0
            return self._allowed_after(token_ids)

    def _allowed_after(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        if len(token_ids) < self._num_tokens:
            self._matcher.reset()
            self._num_tokens = 0
        self._matcher.consume_tokens(token_ids[self._num_tokens :].tolist())
        self._num_tokens = len(token_ids)
        _check(self._matcher)
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        _check(self._matcher)
        allowed = np.unpackbits(packed, count=self._vocab_size, bitorder="little").astype(np.bool_)
        if not allowed.any():
            raise GrammarError(_DEAD_END)
        return allowed


def load_grammar_compiler(
    model_dir: Path, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarCompiler:
    """Of a checkpoint. Raises GrammarError: no tokenizer.json, or not one that grammars can be followed with."""
    try:
        text = (model_dir / "tokenizer.json").read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GrammarError(f"the model has no tokenizer: {error}") from error
    return GrammarCompiler(text, vocab_size=vocab_size, eos_token_ids=eos_token_ids)


def grammar_text(kind: GrammarKind, source: str, preface: str | None = None) -> str:
    """What travels: a grammar in llguidance's own form. source: JSON for "json" and "choice"; "grammar": Lark's form or
    GBNF. preface: rules in Lark's form of an answer that the grammar is a part of, as `ANSWER`. Raises GrammarError for
    what cannot be read; whether it can be followed is known when it is compiled."""
    try:
        grammar = _grammar_alone(kind, source)
    except ValueError as error:
        raise GrammarError(shown(str(error))) from error
    return grammar if preface is None else _with_preface(grammar, preface)


def _grammar_alone(kind: GrammarKind, source: str) -> str:
    """Raises ValueError."""
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(
            source, overrides={"whitespace_flexible": True, "whitespace_pattern": BLANKS}
        )
    if kind == "choice":
        options = " | ".join(json.dumps(option) for option in json.loads(source))
        return LLMatcher.grammar_from_lark(f"start: {options}")
    if kind == "lark":
        return LLMatcher.grammar_from_lark(source)
    return grammar_from(kind, source)


def _with_preface(grammar: str, preface: str) -> str:
    """llguidance's own form is Lark's, or a list of grammars of which the first begins and may name others."""
    alone = grammar.lstrip()
    answer = json.loads(alone)["grammars"][0] if alone[:1] == "{" else {"lark_grammar": grammar}
    named = {**answer, "name": ANSWER.removeprefix("@")}
    return json.dumps({"grammars": [{"lark_grammar": preface}, named]}, ensure_ascii=False)


def shown(message: str) -> str:
    """One short line of what llguidance says."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"


def _check(matcher: LLMatcher) -> None:
    if not matcher.is_error():
        return
    message = matcher.get_error()
    if message.startswith("NoExtension"):
        raise GrammarError(_DEAD_END)
    raise _LimitError(shown(message))
