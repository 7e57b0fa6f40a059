"""<tool_call>{"name": …, "arguments": {…}}</tool_call>, of Hermes and Qwen models, one pair of tags per call.

The closing tag may be missing at the end of the text: models leave it out before they end their turn.
"""

from router_service.tool_calls.call_format import CallFormat, CallLayout, Calls, read_json_call
from router_service.tool_calls.cursor import Cursor, Reading

_BEGIN, _END = "<tool_call>", "</tool_call>"


def _read(cursor: Cursor, calls: Calls) -> Reading[None]:
    yield from cursor.literal(_BEGIN)
    yield from cursor.space()
    whole = yield from read_json_call(cursor, calls)
    yield from cursor.space()
    yield from cursor.closing(_END)
    calls.end(whole)


_HEAD, _TAIL = _BEGIN + '\n{"name": "', "}\n" + _END
HERMES = CallFormat(
    marker=_BEGIN,
    special=(_BEGIN, _END),
    read=_read,
    layout=CallLayout(_HEAD, '", "arguments": ', f"{_TAIL}\n{_HEAD}", _TAIL),
)
