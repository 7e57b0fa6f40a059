"""The output of one choice as a client sees it: text up to the stop string, ids up to the token that completed it.

Stop strings are looked for in all that is generated, then the text is read: reasoning, content, tool calls.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from cluster.scores import ScoreColumns
from router_service.answer_reading import PLAIN, AnswerReader
from router_service.detokenizer import Detokenizer
from router_service.logprobs import ScoredToken, scored_token
from router_service.said import Said, joined
from router_service.stop_strings import StopStrings


@dataclass(frozen=True)
class TextDelta:
    """What is new and the ids that belong to it; both may be empty. scored: the same tokens, if log-probs were
    asked."""

    said: Said
    token_ids: list[int]
    scored: list[ScoredToken]


class ChoiceOutput:
    """Owner of what was generated for one prompt. Each token goes through once, so cost does not grow with length.

    Ids are given out with the text that they complete, so none beyond a stop string is ever given out.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        *,
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        num_logprobs: int = 0,
        reader: AnswerReader | None = None,
    ) -> None:
        """stop_token_ids: one of them is the last token and has no text; min_tokens: see StopStrings; num_logprobs:
        alternatives that were asked for with every score; reader: without one all text is content."""
        self._detokenizer = detokenizer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stop = StopStrings(stop, min_tokens=min_tokens)
        self._num_logprobs = num_logprobs
        self._held_ids: list[int] = []
        self._held_scored: list[ScoredToken] = []
        self._num_given = 0
        self._num_decoded = 0
        """Characters of all tokens so far, those that are held back too."""
        self._reader = reader or PLAIN.reader()
        self._full_at: int | None = None
        self.num_tokens = 0
        self._num_reasoning = 0

    @property
    def stopped_at(self) -> int | None:
        """1-based number of the token that completed a stop string, or the last call that is wanted; None: neither."""
        return self._full_at if self._stop.match is None else self._stop.match.num_tokens

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        return min(self._num_reasoning, self.num_tokens)

    @property
    def stop_string(self) -> str | None:
        """The one that ended the text."""
        return None if self._stop.match is None else self._stop.match.text

    def add(self, token_ids: Sequence[int], scores: ScoreColumns | None = None) -> TextDelta:
        """Tokens after a match are ignored: the engine may be some steps ahead. scores: of all of these tokens."""
        rows = [None] * len(token_ids) if scores is None else scores.split()
        pieces = [
            self._add_one(token_id, row)
            for token_id, row in zip(token_ids, rows, strict=True)
            if self.stopped_at is None
        ]
        return self._delta(joined(pieces))

    def finish(self) -> TextDelta:
        """The rest: an incomplete character, and text that could have become a stop string."""
        if self.stopped_at is not None:
            return self._delta(self._reader.finish(), final=True)
        text = self._stop.finish(self._detokenizer.finish(), self.num_tokens)
        if self.stopped_at is not None:
            self._cut(self.stopped_at)
        return self._delta(joined([self._reader.add(text), self._reader.finish()]), final=True)

    def _add_one(self, token_id: int, score: ScoreColumns | None) -> Said:
        self.num_tokens += 1
        self._held_ids.append(token_id)
        is_silent = token_id in self._stop_token_ids
        if score is not None:
            broken = 0 if is_silent else self._detokenizer.num_broken_by(token_id)
            place = self._num_decoded + broken
            self._held_scored.append(scored_token(token_id, place, score, self._num_logprobs))
        text = "" if is_silent else self._detokenizer.add(token_id)
        self._num_decoded += len(text)
        text = self._stop.add(text, self.num_tokens)
        if self.stopped_at is not None:
            self._cut(self.stopped_at)
        return self._read(text)

    def _read(self, text: str) -> Said:
        was_reasoning = self._reader.is_reasoning
        said = self._reader.add(text)
        self._num_reasoning += was_reasoning or self._reader.is_reasoning
        if self._reader.is_full:
            self._full_at = self.num_tokens
        return said

    def _cut(self, num_tokens: int) -> None:
        surplus = self.num_tokens - num_tokens
        if surplus:
            del self._held_ids[-surplus:], self._held_scored[-surplus:]
        self.num_tokens = num_tokens

    def _delta(self, said: Said, *, final: bool = False) -> TextDelta:
        if not said and not final:
            return TextDelta(said, [], [])
        token_ids, self._held_ids = self._held_ids, []
        scored, self._held_scored = self._held_scored, []
        self._num_given += len(said.text)
        if final:  # tokens of a stop string begin where the text ends
            scored = [
                replace(token, text_offset=min(token.text_offset, self._num_given))
                for token in scored
            ]
        return TextDelta(said, token_ids, scored)
