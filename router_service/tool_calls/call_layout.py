"""How a template writes calls, read out of a chat that shows two: that is what the model was trained to write."""

from collections.abc import Generator

from router_service.template_probes import PROBE_FUNCTION
from router_service.tool_calls.call_format import CallFormat, CallLayout, WrittenCall
from router_service.tool_calls.cursor import Cursor, NotACallError


def shown_layout(form: CallFormat, shown: str) -> CallLayout | None:
    """Of the probe's two calls in `shown`; None if it cannot be told where their parts stand."""
    first = shown.find(PROBE_FUNCTION)
    begin = shown.rfind(form.marker, 0, max(first, 0))
    arguments = _object_behind(shown, first)
    if begin < 0 or arguments is None:
        return None
    second = shown.find(PROBE_FUNCTION, arguments.stop)
    others = _object_behind(shown, second)
    if others is None:
        return None
    between = shown[first + len(PROBE_FUNCTION) : arguments.start]
    if shown[second + len(PROBE_FUNCTION) : others.start] != between:
        return None
    cursor = _ended(shown, shown.rfind(form.marker, 0, second))
    _exhaust(form.read(cursor, _AnyCalls()))
    return CallLayout(
        head=shown[begin:first],
        between=between,
        separator=shown[arguments.stop : second],
        tail=shown[others.stop : cursor.place].rstrip(),
    )


class _AnyCalls:
    """Takes all of them."""

    def begin(self, name: str) -> bool:
        return True

    def argue(self, piece: str, is_last: bool) -> None:
        pass

    def end(self, whole: WrittenCall | None) -> None:
        pass


def _object_behind(text: str, place: int) -> range | None:
    """The first JSON object behind a name."""
    start = text.find("{", place) if place >= 0 else -1
    if start < 0:
        return None
    cursor = _ended(text, start)
    return range(start, cursor.place) if _exhaust(cursor.json()) else None


def _ended(text: str, place: int) -> Cursor:
    cursor = Cursor(text, place)
    cursor.ended = True
    return cursor


def _exhaust(reading: Generator[None, None, object]) -> bool:
    """Of a text that has ended; whether it could be read."""
    try:
        for _ in reading:
            pass
    except NotACallError:
        return False
    return True
