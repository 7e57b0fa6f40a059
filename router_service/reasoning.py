"""Reasoning and content of a growing text, told apart by <think> and </think>; markers may be split anywhere.

Line breaks next to a marker are format and belong to neither side, as chat templates write them. A text that ends
within its reasoning has no content. Pure but for its buffer.
"""

from enum import Enum, auto

from router_service.marked_text import num_pending
from router_service.said import Said

THINK, END_THINK = "<think>", "</think>"


class ReasoningStart(Enum):
    """Where an answer starts, after its prompt."""

    INSIDE = auto()
    """In the reasoning: the prompt has opened it, or the model never writes the opening marker."""
    IF_OPENED = auto()
    """In the reasoning if <think> comes first, after white space at most."""
    OUTSIDE = auto()
    """In the content: the prompt has closed the reasoning, or goes on with a content."""


class ReasoningSplitter:
    """Owner of the text that cannot be sorted yet."""

    def __init__(self, start: ReasoningStart) -> None:
        self.inside = start is ReasoningStart.INSIDE
        self._may_open = start is not ReasoningStart.OUTSIDE
        """<think> has not been seen and would still be a marker."""
        self._buffer = ""
        self._skips_breaks = self.inside
        """Line breaks that come next belong to a marker before them."""

    def add(self, text: str) -> Said:
        """What this text decides."""
        self._buffer += text
        reasoning = self._opened_reasoning()
        return Said(text=self._content(), reasoning=reasoning)

    def finish(self) -> Said:
        """The rest, at the end of the answer."""
        rest, self._buffer = self._buffer, ""
        if self.inside:
            return Said(reasoning=self._after_breaks(rest).rstrip("\n"))
        return Said(text=self._after_breaks(rest))

    def _opened_reasoning(self) -> str:
        if self._may_open:
            self._look_for_opening()
        if self._may_open or not self.inside:
            return ""
        self._buffer = self._after_breaks(self._buffer)
        end = self._buffer.find(END_THINK)
        if end >= 0:
            reasoning, self._buffer = self._buffer[:end], self._buffer[end + len(END_THINK) :]
            self.inside, self._skips_breaks = False, True
            return reasoning.rstrip("\n")
        certain = len(self._buffer) - num_pending(self._buffer, END_THINK)
        return self._take(len(self._buffer[:certain].rstrip("\n")))

    def _look_for_opening(self) -> None:
        begun = self._buffer.lstrip()
        if begun.startswith(THINK):
            self._buffer = begun[len(THINK) :]
            self.inside, self._may_open, self._skips_breaks = True, False, True
        elif not THINK.startswith(begun):
            self._may_open, self._skips_breaks = False, self.inside

    def _content(self) -> str:
        if self._may_open or self.inside:
            return ""
        self._buffer = self._after_breaks(self._buffer)
        return self._take(len(self._buffer))

    def _after_breaks(self, text: str) -> str:
        if not self._skips_breaks:
            return text
        stripped = text.lstrip("\n")
        self._skips_breaks = not stripped
        return stripped

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken
