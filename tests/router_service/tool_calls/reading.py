"""Reads texts with the parsers, whole and in pieces."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from router_service.said import Said, joined
from router_service.tool_calls.call_format import CallFormat
from router_service.tool_calls.parser import ToolCallParser

NAMES = ("f", "get_weather", "g-2")


@dataclass(frozen=True)
class Offered:
    """checked: have to be seen whole, and are all accepted."""

    names: Collection[str] = NAMES
    checked: Collection[str] = ()

    def offers(self, name: str) -> bool:
        return name in self.names

    def must_see(self, name: str) -> bool:
        return name in self.checked

    def accept(self, name: str, arguments: str) -> bool:
        return True


OFFERED = Offered()


def make_parser(
    form: CallFormat, max_calls: int | None = None, offered: Offered = OFFERED
) -> ToolCallParser:
    """With ids 0, 1, …"""
    numbers = itertools.count()
    return ToolCallParser(form, offered, lambda: str(next(numbers)), max_calls=max_calls)


def told(
    form: CallFormat,
    pieces: Sequence[str],
    max_calls: int | None = None,
    offered: Offered = OFFERED,
) -> list[Said]:
    """Piece by piece, and at the end."""
    parser = make_parser(form, max_calls, offered)
    return [*map(parser.add, pieces), parser.finish()]


def read(
    form: CallFormat,
    pieces: Sequence[str],
    max_calls: int | None = None,
    offered: Offered = OFFERED,
) -> Said:
    return joined(told(form, pieces, max_calls, offered))


def calls(said: Said) -> list[tuple[str, str]]:
    """Those that ended."""
    return [(call.name, call.arguments) for call in said.tool_calls if call.is_whole]


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text in pieces that end at these places, taken modulo its length."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(ends)]
