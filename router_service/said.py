"""What an answer says, sorted: reasoning, content and tool calls. Values only."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class CallHead:
    id: str
    name: str


@dataclass(frozen=True)
class CallPart:
    """Of a tool call: what its arguments go on with. head: of the first part only; ends: of the last one only, with
    which the arguments are a JSON object, as the model wrote it."""

    arguments: str = ""
    head: CallHead | None = None
    ends: bool = False


@dataclass(frozen=True)
class ToolCall:
    """arguments: a JSON object as text, or the beginning of one where `is_whole` is false."""

    id: str
    name: str
    arguments: str
    is_whole: bool


@dataclass(frozen=True)
class Said:
    """A part of an answer, or a whole one; text: the content."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)

    @property
    def going_on(self) -> tuple[CallPart, ...]:
        """Of the call that was begun before, if it goes on. It comes before all else: what is said ends a call."""
        return self.calls[:1] if self.calls and self.calls[0].head is None else ()

    @property
    def begun(self) -> tuple[CallPart, ...]:
        """Of the calls that were begun here."""
        return self.calls[len(self.going_on) :]

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The same, as far as they are said here."""
        return [
            ToolCall(part.head.id, part.head.name, part.arguments, part.ends)
            for part in self.calls
            if part.head is not None
        ]


def joined(parts: Iterable[Said]) -> Said:
    """In the order in which they were said."""
    parts = list(parts)
    return Said(
        "".join(part.text for part in parts),
        "".join(part.reasoning for part in parts),
        _joined_calls(call for part in parts for call in part.calls),
    )


def _joined_calls(parts: Iterable[CallPart]) -> tuple[CallPart, ...]:
    """One part per call."""
    calls: list[list[CallPart]] = []
    for part in parts:
        if part.head is not None or not calls:
            calls.append([])
        calls[-1].append(part)
    return tuple(
        CallPart("".join(part.arguments for part in call), call[0].head, call[-1].ends)
        for call in calls
    )
