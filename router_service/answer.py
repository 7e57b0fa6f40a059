"""What one client asked for at once, choices and prompts: made by one set of weights, or told that it was not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from cluster.messages import Submit


@dataclass(eq=False)
class Answer:
    """Shared by the requests of it. Written by the engine."""

    is_streamed: bool
    """The client sees tokens as they come; otherwise nothing before all is there."""
    has_begun: bool = False
    """Some of it was admitted, here or by an engine that is lost."""
    was_told: bool = False
    """Some of it that is shown before its end has left the engine, or that one."""

    @classmethod
    def to(cls, submits: Sequence[Submit]) -> Self:
        """All that was asked for at once."""
        was_told = any(submit.output_token_ids is not None for submit in submits)
        return cls(submits[0].is_streamed, has_begun=was_told, was_told=was_told)

    @property
    def may_be_shown(self) -> bool:
        """The client may have seen a part of it."""
        return self.is_streamed and self.was_told
