"""Tool calls and content of a growing text, whatever the format of the calls.

A call is told from where its arguments begin, bit by bit. What stands there before that and is no call of an offered
function is content, marker and all; what breaks off within its arguments is a call that does not end, and what follows
is content: so nothing that was told has to be taken back. White space next to calls is format and told to nobody. Pure
but for buffer and ids.
"""

from collections.abc import Callable
from dataclasses import dataclass

from router_service.marked_text import num_pending
from router_service.said import CallHead, CallPart, Said, joined
from router_service.tool_calls.call_format import CallFormat, Functions, WrittenCall
from router_service.tool_calls.cursor import Cursor, NotACallError, Reading


@dataclass(frozen=True)
class _Begun:
    cursor: Cursor
    reading: Reading[None]
    start: int


class ToolCallParser:
    """Owner of the text that cannot be sorted yet, and of a call that is half read. It is the Calls of its readings."""

    def __init__(
        self,
        form: CallFormat,
        functions: Functions,
        new_id: Callable[[], str],
        *,
        max_calls: int | None = None,
    ) -> None:
        self._form = form
        self._functions = functions
        self._new_id = new_id
        self._max_calls = max_calls
        self.num_calls = 0
        """Told to their ends."""
        self._num_begun = 0
        self.is_full = False
        """No further call is wanted: the answer is to end here."""
        self._text = ""
        self._start = 0
        """Where the text begins that has not been sorted."""
        self._begun: _Begun | None = None
        """What begins at `_start`, or has begun before what was told of its calls up to there."""
        self._parts: list[Said] = []
        """Sorted, to be told."""
        self._space = ""
        """White space before what comes next."""
        self._is_after_call = False

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
        self._begun = _Begun(cursor, self._form.read(cursor, self), place)
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
            self._leave(cursor.place)
        except NotACallError:
            self._leave(self._start)
        else:
            return False
        return True

    def _leave(self, end: int) -> None:
        """Of a reading that told of calls the text is sorted up to `end`."""
        begun, self._begun = self._begun, None
        assert begun is not None
        if self._start > begun.start:
            self._start = end
            self._fill()
        else:
            self._tell(self._start + 1)  # no call begins here, perhaps behind

    # --- told by a reading

    def begin(self, name: str) -> bool:
        if self._has_enough or not self._functions.offers(name):
            raise NotACallError
        if self._functions.must_see(name):
            return False
        self._say(CallPart(head=self._head(name)))
        return True

    def argue(self, piece: str, is_last: bool) -> None:
        self._say(CallPart(piece, ends=is_last))

    def end(self, whole: WrittenCall | None) -> None:
        if whole is None:
            self._go_on()
        elif self._has_enough or not self._accepts(whole):
            raise NotACallError
        else:
            self._say(CallPart(whole.arguments, self._head(whole.name), ends=True))
        self._fill()

    @property
    def _has_enough(self) -> bool:
        return self._max_calls is not None and self._num_begun >= self._max_calls

    def _accepts(self, call: WrittenCall) -> bool:
        functions = self._functions
        return functions.offers(call.name) and functions.accept(call.name, call.arguments)

    def _head(self, name: str) -> CallHead:
        self._num_begun += 1
        return CallHead(self._new_id(), name)

    def _say(self, part: CallPart) -> None:
        """What was told of a call stays told, whatever follows it."""
        self._parts.append(Said(calls=(part,)))
        self.num_calls += part.ends
        self._go_on()

    def _go_on(self) -> None:
        assert self._begun is not None
        self._start, self._space, self._is_after_call = self._begun.cursor.place, "", True

    def _fill(self) -> None:
        if self._max_calls is not None and self.num_calls >= self._max_calls:
            self.is_full = True

    # --- content

    def _tell(self, end: int) -> None:
        """The text up to `end` is content."""
        text = self._space + self._text[self._start : end]
        self._start = end
        told = text.rstrip()
        self._space = text[len(told) :]
        if told:
            self._parts.append(Said(text=told))
            self._is_after_call = False
