"""What an answer says, sorted: reasoning, content and tool calls. Values only."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ToolCall:
    """A complete call. arguments: a JSON object as text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Said:
    """A part of an answer, or a whole one; text: the content."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


def joined(parts: Iterable[Said]) -> Said:
    """In the order in which they were said. A call is in exactly one part."""
    parts = list(parts)
    return Said(
        "".join(part.text for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.calls),
    )
