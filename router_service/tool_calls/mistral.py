"""[TOOL_CALLS] of Mistral's models: one JSON list of calls, or, in newer ones, name[ARGS]{…} per marker.

Between name and [ARGS] some write [CALL_ID] and an id, and some leave [ARGS] out.
"""

from router_service.tool_calls.call_format import (
    MAX_NAME_LENGTH,
    CallFormat,
    CallLayout,
    Calls,
    WrittenCall,
    read_arguments,
    read_json_call,
)
from router_service.tool_calls.cursor import Cursor, Reading

_BEGIN, _ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read(cursor: Cursor, calls: Calls) -> Reading[None]:
    yield from cursor.literal(_BEGIN)
    yield from cursor.space()
    if (yield from cursor.at("[")):
        yield from _listed(cursor, calls)
    else:
        calls.end((yield from _named(cursor, calls)))


def _listed(cursor: Cursor, calls: Calls) -> Reading[None]:
    while True:
        yield from cursor.space()
        calls.end((yield from read_json_call(cursor, calls)))
        yield from cursor.space()
        if not (yield from cursor.at(",")):
            break
    yield from cursor.closing("]")


def _named(cursor: Cursor, calls: Calls) -> Reading[WrittenCall | None]:
    name = yield from cursor.word(MAX_NAME_LENGTH)
    yield from cursor.space()
    if (yield from cursor.at(_CALL_ID)):
        yield from cursor.word(MAX_NAME_LENGTH)
        yield from cursor.literal(_ARGUMENTS)
    else:
        yield from cursor.at(_ARGUMENTS)
    yield from cursor.space()
    return (yield from read_arguments(cursor, calls, name))


_NAME = '{"name": "'
MISTRAL = CallFormat(
    marker=_BEGIN,
    special=(_BEGIN, _ARGUMENTS, _CALL_ID),
    read=_read,
    layout=CallLayout(f"{_BEGIN} [{_NAME}", '", "arguments": ', f"}}, {_NAME}", "}]"),
    id_length=9,
)
