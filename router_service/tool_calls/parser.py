"""Tool calls and content of a growing text, whatever the format of the calls.

What is no complete and acceptable call is content, marker and all: a call is told when it has ended, so nothing that
was told has to be taken back. White space next to calls is format and told to nobody. Pure but for buffer and ids.
"""

from collections.abc import Callable
from dataclasses import dataclass

from router_service.marked_text import num_pending
from router_service.said import Said, ToolCall, joined
from router_service.tool_calls.call_format import CallFormat, WrittenCall
from router_service.tool_calls.cursor import Cursor, NotACallError, Reading

Accepts = Callable[[WrittenCall], bool]
"""Whether a call is one that the client can take: of a tool that it offers."""


@dataclass(frozen=True)
class _Begun:
    cursor: Cursor
    reading: Reading[None]
    num_calls_before: int


class ToolCallParser:
    """Owner of the text that cannot be sorted yet, and of a call that is half read."""

    def __init__(
        self,
        form: CallFormat,
        accepts: Accepts,
        new_id: Callable[[], str],
        *,
        max_calls: int | None = None,
    ) -> None:
        self._form = form
        self._accepts = accepts
        self._new_id = new_id
        self._max_calls = max_calls
        self.num_calls = 0
        self._text = ""
        self._start = 0
        """Where the text begins that has not been sorted."""
        self._begun: _Begun | None = None
        """What begins at `_start`, or has begun before the calls that end there."""
        self._parts: list[Said] = []
        """Sorted, to be told."""
        self._space = ""
        """White space before what comes next."""
        self._is_after_call = False

    @property
    def is_full(self) -> bool:
        """No further call is wanted: the answer is to end here."""
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def add(self, text: str) -> Said:
        """What this text decides. Nothing, once the parser is full."""
        self._text += text
        return self._advance(final=False)

    def finish(self) -> Said:
        """The rest, at the end of the answer."""
        rest = self._advance(final=True)
        if self._is_after_call or self.is_full:
            return rest
        return joined([rest, Said(text=self._space)])

    def _advance(self, *, final: bool) -> Said:
        while not self.is_full and (self._read(final) if self._begun else self._seek(final)):
            pass
        if self._begun is None:
            self._text, self._start = self._text[self._start :], 0
        told, self._parts = joined(self._parts), []
        return told

    def _seek(self, final: bool) -> bool:
        """Content up to the next marker. False: more text is needed."""
        place = self._text.find(self._form.marker, self._start)
        if place < 0:
            pending = 0 if final else num_pending(self._text[self._start :], self._form.marker)
            self._tell(len(self._text) - pending)
            return False
        self._tell(place)
        cursor = Cursor(self._text, place)
        reading = self._form.read(cursor, lambda call: self._found(cursor, call))
        self._begun = _Begun(cursor, reading, self.num_calls)
        return True

    def _read(self, final: bool) -> bool:
        """As much of calls as is there. False: more text is needed."""
        begun = self._begun
        assert begun is not None
        cursor = begun.cursor
        cursor.text, cursor.ended = self._text, final
        try:
            next(begun.reading)
        except StopIteration:
            self._begun = None
            if self.num_calls > begun.num_calls_before:
                self._start = cursor.place
                return True
        except NotACallError:
            self._begun = None
        else:
            return False
        if self.num_calls == begun.num_calls_before:
            self._tell(self._start + 1)  # no call begins here, perhaps behind
        return True

    def _found(self, cursor: Cursor, call: WrittenCall) -> None:
        """What was told of a call stays told, whatever follows it."""
        if self.is_full or not self._accepts(call):
            raise NotACallError
        self._parts.append(Said(calls=(ToolCall(self._new_id(), call.name, call.arguments),)))
        self.num_calls += 1
        self._start, self._space, self._is_after_call = cursor.place, "", True

    def _tell(self, end: int) -> None:
        """The text up to `end` is content."""
        text = self._space + self._text[self._start : end]
        self._start = end
        told = text.rstrip()
        self._space = text[len(told) :]
        if told:
            self._parts.append(Said(text=told))
            self._is_after_call = False
