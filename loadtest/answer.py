"""A streamed answer of the OpenAI API: when its pieces came, what its usage says, and what counts as failed."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from loadtest.sse import EventReader

_DONE = "[DONE]"


class AnswerFailed(Exception):
    """The stream holds an error, ends too early, or is not what the API promises."""


@dataclass(frozen=True)
class TokenCounts:
    """Prompt tokens by where they came from, and the tokens of answers."""

    computed: int = 0
    cached: int = 0
    replayed: int = 0
    generated: int = 0

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(
            self.computed + other.computed,
            self.cached + other.cached,
            self.replayed + other.replayed,
            self.generated + other.generated,
        )

    @property
    def prompt(self) -> int:
        return self.computed + self.cached + self.replayed


@dataclass(frozen=True)
class Answer:
    """As it came to this side.

    first_seconds: from the request to the first piece of text, or to the end of an answer without text
    gap_seconds:   between pieces of text; pieces that arrive together have no gap
    """

    text: str
    first_seconds: float
    gap_seconds: tuple[float, ...]
    tokens: TokenCounts


def read_answer(chunks: Iterable[bytes], clock: Callable[[], float]) -> Answer:
    """`clock`: seconds since the request. Reads to the end of the stream. Raises AnswerFailed."""
    reader, reading = EventReader(), _Reading()
    for chunk in chunks:
        try:
            for data in reader.feed(chunk):
                reading.take(data, clock())
        except ValueError as error:
            raise AnswerFailed(f"neither UTF-8 nor JSON: {error}") from error
    return reading.answer()


class _Reading:
    """What has come so far."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._seconds: list[float] = []
        self._finished_at: float | None = None
        self._usage: dict[str, Any] | None = None
        self._done = False

    def take(self, data: str, now: float) -> None:
        """Raises AnswerFailed; ValueError if it is not JSON."""
        if data == _DONE:
            self._done = True
            return
        event = json.loads(data)
        if "error" in event:
            raise AnswerFailed(f"error in the stream: {_message(event['error'])}")
        for choice in event.get("choices") or ():
            self._take_choice(choice, now)
        self._usage = event.get("usage") or self._usage

    def _take_choice(self, choice: dict[str, Any], now: float) -> None:
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:
            self._pieces.append(text)
            self._seconds.append(now)
        if choice.get("finish_reason") is not None:
            self._finished_at = now

    def answer(self) -> Answer:
        """Raises AnswerFailed."""
        if self._finished_at is None:
            raise AnswerFailed("the stream ended before a finish_reason")
        if not self._done:
            raise AnswerFailed("the stream ended without [DONE]")
        if self._usage is None:
            raise AnswerFailed("the stream has no usage")
        return Answer(
            text="".join(self._pieces),
            first_seconds=self._seconds[0] if self._seconds else self._finished_at,
            gap_seconds=tuple(later - earlier for earlier, later in pairwise(self._seconds)),
            tokens=_token_counts(self._usage),
        )


def _message(error: Any) -> str:
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)


def _token_counts(usage: dict[str, Any]) -> TokenCounts:
    """Servers that do not replay do not say so. Raises AnswerFailed."""
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    replayed = details.get("replayed_tokens") or 0
    computed = usage["prompt_tokens"] - cached - replayed
    if computed < 0:
        raise AnswerFailed(f"more tokens cached and replayed than the prompt has: {usage}")
    return TokenCounts(computed, cached, replayed, usage["completion_tokens"])
