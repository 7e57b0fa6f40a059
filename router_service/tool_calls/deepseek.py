"""Tool calls of DeepSeek's models between markers of their own, several calls in one list.

V3 and R1 write the kind (function), the name, and the arguments as a fenced JSON block; V3.1 the name and JSON alone.
"""

from router_service.tool_calls.call_format import (
    MAX_NAME_LENGTH,
    CallFormat,
    CallLayout,
    Calls,
    WrittenCall,
    read_arguments,
)
from router_service.tool_calls.cursor import Cursor, Reading

_BEGIN_ALL, _END_ALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _read(cursor: Cursor, calls: Calls) -> Reading[None]:
    yield from cursor.literal(_BEGIN_ALL)
    yield from cursor.space()
    while (yield from cursor.at(_BEGIN)):
        calls.end((yield from _call(cursor, calls)))
        yield from cursor.space()
    yield from cursor.closing(_END_ALL)


def _call(cursor: Cursor, calls: Calls) -> Reading[WrittenCall | None]:
    yield from cursor.space()
    name = yield from cursor.word(MAX_NAME_LENGTH)
    yield from cursor.literal(_SEPARATOR)
    yield from cursor.space()
    fenced = False
    if not (yield from cursor.at("{")):
        name, fenced = (yield from _fenced_name(cursor)), True
    else:
        cursor.place -= 1
    whole = yield from read_arguments(cursor, calls, name)
    yield from cursor.space()
    if fenced:
        yield from cursor.closing("```")
        yield from cursor.space()
    yield from cursor.closing(_END)
    return whole


def _fenced_name(cursor: Cursor) -> Reading[str]:
    name = yield from cursor.word(MAX_NAME_LENGTH)
    yield from cursor.space()
    yield from cursor.literal("```json")
    yield from cursor.space()
    return name


_HEAD, _TAIL = f"{_BEGIN}function{_SEPARATOR}", f"\n```{_END}"
DEEPSEEK = CallFormat(
    marker=_BEGIN_ALL,
    special=(_BEGIN_ALL, _END_ALL, _BEGIN, _SEPARATOR, _END),
    read=_read,
    layout=CallLayout(_BEGIN_ALL + _HEAD, "\n```json\n", f"{_TAIL}\n{_HEAD}", f"{_TAIL}{_END_ALL}"),
)
