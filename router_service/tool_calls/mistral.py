"""[TOOL_CALLS] of Mistral's models: one JSON list of calls, or, in newer ones, name[ARGS]{…} per marker.

Between name and [ARGS] some write [CALL_ID] and an id, and some leave [ARGS] out.
"""

from router_service.tool_calls.call_format import (
    MAX_NAME_LENGTH,
    CallFormat,
    CallLayout,
    Found,
    WrittenCall,
    argument_text,
    decode_call,
)
from router_service.tool_calls.cursor import Cursor, Reading

_BEGIN, _ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read(cursor: Cursor, found: Found) -> Reading[None]:
    yield from cursor.literal(_BEGIN)
    yield from cursor.space()
    if (yield from cursor.at("[")):
        yield from _listed(cursor, found)
    else:
        found((yield from _named(cursor)))


def _listed(cursor: Cursor, found: Found) -> Reading[None]:
    while True:
        yield from cursor.space()
        found(decode_call((yield from cursor.json())))
        yield from cursor.space()
        if not (yield from cursor.at(",")):
            break
    yield from cursor.closing("]")


def _named(cursor: Cursor) -> Reading[WrittenCall]:
    name = yield from cursor.word(MAX_NAME_LENGTH)
    yield from cursor.space()
    if (yield from cursor.at(_CALL_ID)):
        yield from cursor.word(MAX_NAME_LENGTH)
        yield from cursor.literal(_ARGUMENTS)
    else:
        yield from cursor.at(_ARGUMENTS)
    yield from cursor.space()
    return WrittenCall(name, argument_text((yield from cursor.json())))


_NAME = '{"name": "'
MISTRAL = CallFormat(
    marker=_BEGIN,
    special=(_BEGIN, _ARGUMENTS, _CALL_ID),
    read=_read,
    layout=CallLayout(f"{_BEGIN} [{_NAME}", '", "arguments": ', f"}}, {_NAME}", "}]"),
    id_length=9,
)
