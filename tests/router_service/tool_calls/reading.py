"""Reads texts with the parsers, whole and in pieces."""

import itertools
from collections.abc import Sequence

from router_service.said import Said, joined
from router_service.tool_calls.call_format import CallFormat
from router_service.tool_calls.parser import ToolCallParser

NAMES = ("f", "get_weather", "g-2")


def make_parser(form: CallFormat, max_calls: int | None = None) -> ToolCallParser:
    """Calls of NAMES, with ids 0, 1, …"""
    numbers = itertools.count()
    return ToolCallParser(
        form, lambda call: call.name in NAMES, lambda: str(next(numbers)), max_calls=max_calls
    )


def read(form: CallFormat, pieces: Sequence[str], max_calls: int | None = None) -> Said:
    parser = make_parser(form, max_calls)
    told = [parser.add(piece) for piece in pieces]
    return joined([*told, parser.finish()])


def calls(said: Said) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in said.calls]


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text in pieces that end at these places, taken modulo its length."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(ends)]
