"""What one client asked for at once, choices and prompts: made by one set of weights, or told that it was not."""

from dataclasses import dataclass


@dataclass(eq=False)
class Answer:
    """Shared by the requests of it. Written by the engine."""

    is_streamed: bool
    """The client sees tokens as they come; otherwise nothing before all is there."""
    has_begun: bool = False
    """Some of it was admitted."""
    was_told: bool = False
    """Some of it that is shown before its end has left the engine."""

    @property
    def may_be_shown(self) -> bool:
        """The client may have seen a part of it."""
        return self.is_streamed and self.was_told
