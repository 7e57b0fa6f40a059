"""<tool_call>{"name": …, "arguments": {…}}</tool_call>, of Hermes and Qwen models, one pair of tags per call.

The closing tag may be missing at the end of the text: models leave it out before they end their turn.
"""

from router_service.tool_calls.call_format import CallFormat, CallLayout, Found, decode_call
from router_service.tool_calls.cursor import Cursor, Reading

_BEGIN, _END = "<tool_call>", "</tool_call>"


def _read(cursor: Cursor, found: Found) -> Reading[None]:
    yield from cursor.literal(_BEGIN)
    yield from cursor.space()
    call = decode_call((yield from cursor.json()))
    yield from cursor.space()
    yield from cursor.closing(_END)
    found(call)


_HEAD, _TAIL = _BEGIN + '\n{"name": "', "}\n" + _END
HERMES = CallFormat(
    marker=_BEGIN,
    special=(_BEGIN, _END),
    read=_read,
    layout=CallLayout(_HEAD, '", "arguments": ', f"{_TAIL}\n{_HEAD}", _TAIL),
)
