"""How the text of an answer is read: as it is, or sorted into reasoning, content and tool calls."""

import secrets
import string
from dataclasses import dataclass

from router_service.reasoning import END_THINK, THINK, ReasoningSplitter, ReasoningStart
from router_service.said import Said, joined
from router_service.tool_calls.call_format import CallFormat, Functions
from router_service.tool_calls.parser import ToolCallParser

_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolReading:
    """max_calls: after which the answer ends; None: it may have any number; is_of_one_function: the client named it."""

    form: CallFormat
    functions: Functions
    max_calls: int | None = None
    is_of_one_function: bool = False

    def parser(self) -> ToolCallParser:
        return ToolCallParser(self.form, self.functions, self._new_id, max_calls=self.max_calls)

    def _new_id(self) -> str:
        length = self.form.id_length
        if length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(length))


@dataclass(frozen=True)
class AnswerReading:
    """reasoning: None if the model's answers have none that could be told apart; tools: None if no calls are read."""

    reasoning: ReasoningStart | None = None
    tools: ToolReading | None = None

    @property
    def is_plain(self) -> bool:
        return self.reasoning is None and self.tools is None

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that are text here."""
        thinking = () if self.reasoning is None else (THINK, END_THINK)
        calling = () if self.tools is None else self.tools.form.special
        return frozenset((*thinking, *calling))

    def reader(self) -> "AnswerReader":
        """Of one choice."""
        splitter = None if self.reasoning is None else ReasoningSplitter(self.reasoning)
        return AnswerReader(splitter, None if self.tools is None else self.tools.parser())


PLAIN = AnswerReading()


class AnswerReader:
    """First reasoning from content, then calls from the content: what is thought about a call is none."""

    def __init__(self, splitter: ReasoningSplitter | None, parser: ToolCallParser | None) -> None:
        self._splitter = splitter
        self._parser = parser

    @property
    def is_reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.inside

    @property
    def is_full(self) -> bool:
        """The answer is to end here, with its last call."""
        return self._parser is not None and self._parser.is_full

    @property
    def num_calls(self) -> int:
        return 0 if self._parser is None else self._parser.num_calls

    def add(self, text: str) -> Said:
        """What this text decides."""
        split = Said(text=text) if self._splitter is None else self._splitter.add(text)
        if self._parser is None:
            return split
        read = self._parser.add(split.text)
        return Said(read.text, split.reasoning, read.calls)

    def finish(self) -> Said:
        """The rest, at the end of the answer."""
        split = Said() if self._splitter is None else self._splitter.finish()
        if self._parser is None:
            return split
        rest = joined([self._parser.add(split.text), self._parser.finish()])
        return Said(rest.text, split.reasoning, rest.calls)
