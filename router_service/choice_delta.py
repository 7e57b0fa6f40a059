"""What a choice says, bit by bit, and how it ends. Both ways of answering are made of these."""

from dataclasses import dataclass
from typing import Literal

from cluster.scores import ScoreColumns
from router_service.logprobs import ScoredToken
from router_service.routes_encoding import EncodedRoutes
from router_service.said import CallPart, Said


@dataclass(frozen=True)
class ChoiceEnd:
    """How a choice ended. Counts are tokens; completion_tokens includes the one that completed a stop string.

    Where the prompt came from is told by its first choice, as are, with several choices, the routes of the prompt;
    `routes` are then those of the completion.
    """

    finish_reason: Literal["stop", "length", "tool_calls"]
    completion_tokens: int
    cached_tokens: int
    replayed_tokens: int
    routes: EncodedRoutes | None
    prompt_routes: EncodedRoutes | None = None
    stop_string: str | None = None
    """The one that ended the text, if one did."""
    reasoning_tokens: int = 0
    """Of the completion's, markers included."""


@dataclass(frozen=True)
class ChoiceDelta:
    """What one choice says next, `text` being content; `end` comes with the last one. scored: the same tokens, if
    log-probs were asked."""

    index: int
    text: str
    token_ids: list[int]
    scored: list[ScoredToken]
    weight_version: str
    """The same in all that one answer says."""
    end: ChoiceEnd | None
    prompt_scores: ScoreColumns | None = None
    """[prompt - 1] of the prompt tokens from the second on, once, with the first choice of each prompt, if
    `prompt_logprobs` was asked."""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()

    @property
    def said(self) -> Said:
        return Said(self.text, self.reasoning, self.calls)
