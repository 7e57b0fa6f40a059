"""What a format of tool calls is, and JSON calls, which several formats hold."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from router_service.tool_calls.cursor import Cursor, NotACallError, Reading

MAX_NAME_LENGTH = 64


@dataclass(frozen=True)
class WrittenCall:
    """arguments: a JSON object as text."""

    name: str
    arguments: str


Found = Callable[[WrittenCall], None]
"""Told of a complete call that ends at the cursor. Raises NotACallError for one that is not taken."""


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
    """marker: begins what `read` reads, the cursor standing on it. `read` tells of every complete call at
    once and ends, or raises NotACallError, where no more calls follow. special: markers that tokenizers may hold as
    special tokens; they are text where calls are read. layout: how calls are
    written where no chat template shows it; id_length: of ids that the family's templates take back."""

    marker: str
    special: tuple[str, ...]
    read: Callable[[Cursor, Found], Reading[None]]
    layout: CallLayout
    id_length: int | None = None


class _JsonCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


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
