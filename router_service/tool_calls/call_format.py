"""What a format of tool calls is, and JSON calls, which several formats hold."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from router_service.tool_calls.cursor import Cursor, NotACallError, Reading
from router_service.tool_calls.json_scanner import JsonScanner

MAX_NAME_LENGTH = 64


@dataclass(frozen=True)
class WrittenCall:
    """arguments: a JSON object as text."""

    name: str
    arguments: str


class Calls(Protocol):
    """Who is told of the calls of a reading, at the place of its cursor. All raise NotACallError for one that is not
    taken."""

    def begin(self, name: str) -> bool:
        """Arguments of a call of this function come next. False: it is to be told whole, at its end."""

    def argue(self, piece: str, is_last: bool) -> None:
        """The next piece of the arguments of the call that was begun."""

    def end(self, whole: WrittenCall | None) -> None:
        """The call has ended, with all that belongs to it: `whole`, or the one that was begun."""


class Functions(Protocol):
    """What may be called."""

    def offers(self, name: str) -> bool:
        """Whether there is such a function."""

    def must_see(self, name: str) -> bool:
        """Whether the arguments have to be there as a whole before any of them is told."""

    def accept(self, name: str, arguments: str) -> bool:
        """arguments: a JSON object as text."""


@dataclass(frozen=True)
class CallLayout:
    """Calls as the literal text around them: head NAME between ARGUMENTS (separator NAME between ARGUMENTS)* tail.

    In the text around, template_probes.PROBE_CALL_ID stands for any id of its length.
    """

    head: str
    between: str
    separator: str
    tail: str


@dataclass(frozen=True)
class CallFormat:
    """marker: begins what `read` reads, the cursor standing on it. `read` tells of calls as
    they come and ends, or raises NotACallError, where no more follow. special: markers that tokenizers may hold as
    special tokens; they are text where calls are read. layout: how calls are
    written where no chat template shows it; id_length: of ids that the family's templates take back."""

    marker: str
    special: tuple[str, ...]
    read: Callable[[Cursor, Calls], Reading[None]]
    layout: CallLayout
    id_length: int | None = None


class _JsonCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def read_json_call(cursor: Cursor, calls: Calls) -> Reading[WrittenCall | None]:
    """{"name": …, "arguments": {…}}, perhaps with more members. Told as it comes where it is written in this order;
    otherwise, arguments in quotes included, it is to be told whole, once it has ended."""
    start = cursor.place
    name = yield from _name_before_arguments(cursor)
    if name is not None and calls.begin(name):
        yield from cursor.json(calls.argue)
        yield from cursor.through(JsonScanner.behind_a_member())
        return None
    cursor.place = start
    return decode_call((yield from cursor.json()))


def read_arguments(cursor: Cursor, calls: Calls, name: str) -> Reading[WrittenCall | None]:
    """The object that comes next; None if it was told as it came."""
    yield from cursor.opens_object()
    if calls.begin(name):
        yield from cursor.json(calls.argue)
        return None
    return WrittenCall(name, argument_text((yield from cursor.json())))


def _name_before_arguments(cursor: Cursor) -> Reading[str | None]:
    """The cursor is at the arguments then; None, and it is anywhere, if the text is written otherwise."""
    if not (yield from _are_next(cursor, "{", '"name"', ":")):
        return None
    yield from cursor.space()
    if not (yield from cursor.at('"')):
        return None
    name = yield from cursor.word(MAX_NAME_LENGTH)
    if not (yield from cursor.at('"')):
        return None
    if not (yield from _are_next(cursor, ",", '"arguments"', ":")):
        return None
    yield from cursor.space()
    if not (yield from cursor.at("{")):
        return None
    cursor.place -= 1
    yield from cursor.opens_object()
    return name


def _are_next(cursor: Cursor, *literals: str) -> Reading[bool]:
    """With white space before each."""
    for literal in literals:
        yield from cursor.space()
        if not (yield from cursor.at(literal)):
            return False
    return True


def decode_call(text: str) -> WrittenCall:
    """Of {"name": …, "arguments": {…}}. Raises NotACallError."""
    try:
        call = msgspec.json.decode(text.encode(), type=_JsonCall)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise NotACallError from error
    return WrittenCall(call.name, argument_text(bytes(call.arguments).decode()))


def argument_text(text: str) -> str:
    """A JSON object as text, given as such, as null for none, or as a string that holds one (models write all three).

    Raises NotACallError.
    """
    for candidate in _candidates(text):
        if isinstance(decode_json(candidate), dict):
            return candidate
    raise NotACallError


def _candidates(text: str) -> Iterator[str]:
    yield text
    value = decode_json(text)
    if isinstance(value, str):
        yield value
    elif value is None:
        yield "{}"


def decode_json(text: str) -> object:
    """Raises NotACallError."""
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise NotACallError from error
