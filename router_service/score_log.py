"""Scores of one request's tokens: of generated ones always, of the prompt when it was asked.

prompt   0 ── no score, ever ── 1 ········ num_scored_prompt_tokens ········ num_prompt_tokens
                                known: from the store, or its own   |  to be computed
"""

import numpy as np
import numpy.typing as npt

from cluster.scores import ScoreColumns, TokenScores


class ScoreLog:
    """What is known changes only for scores that list more alternatives, up to as many as are asked."""

    def __init__(
        self, num_prompt_tokens: int, *, scores_prompt: bool, num_alternatives: int
    ) -> None:
        """num_alternatives: listed with each prompt token, at least 1. Memory is taken as tokens get scores."""
        self.scores_prompt = scores_prompt
        self.num_listed = num_alternatives if scores_prompt else 1
        """Alternatives of each token that are kept, here and in the store."""
        self._tokens = TokenScores.unknown(0)
        self.num_stored = 0
        """Tokens whose scores the store was given, or had."""
        self._num_prompt_tokens = num_prompt_tokens

    @property
    def num_scored_prompt_tokens(self) -> int:
        """Up to the first prompt token whose score is asked and missing."""
        if not self.scores_prompt:
            return self._num_prompt_tokens
        missing = self._missing(1, self._num_prompt_tokens)
        return int(missing[0]) + 1 if len(missing) else self._num_prompt_tokens

    @property
    def is_complete(self) -> bool:
        """Of the prompt."""
        return self.num_scored_prompt_tokens == self._num_prompt_tokens

    def num_to_score(self, first: int, end: int) -> int:
        """Of the tokens [first, end), put in: for so many, the first ones, the score of the next token is missing."""
        if not self.scores_prompt:
            return 0
        last = min(end, self._num_prompt_tokens - 1)
        missing = self._missing(first + 1, last + 1)
        return int(missing[-1]) + 1 if len(missing) else 0

    def begin(self, num_leased: int, stored: TokenScores | None) -> None:
        """It starts, perhaps not for the first time. stored: what the store has of the leased tokens, if it was asked;
        it has to be when this request may have scores."""
        if stored is not None and self.scores_prompt:
            self._room(num_leased).fill(0, stored)
        self.num_stored = num_leased
        if stored is not None:
            own = self._tokens.num_listed[:num_leased]
            unsaved = np.flatnonzero(own > stored.num_listed[: len(own)])
            self.num_stored = int(unsaved[0]) if len(unsaved) else num_leased
        if not self.is_complete:
            self.num_stored = min(self.num_stored, self.num_scored_prompt_tokens)

    def add_prompt(self, start: int, scores: ScoreColumns) -> None:
        """Computed for it, of the prompt tokens from `start` on. After a preemption some may be known already."""
        self._room(start + scores.num_tokens).fill(start, scores.stored(self.num_listed))

    def add_output(self, position: int, score: ScoreColumns) -> None:
        """score: of this token alone."""
        if self.num_listed > 1:
            self._room(position + 1).fill(position, score.stored(self.num_listed))
            return
        self._room(position + 1).rows[position] = (
            score.chosen_logprobs[0],
            score.chosen_ranks[0],
            score.top_ids[0],
            score.top_logprobs[0],
        )

    def prompt_columns(self) -> ScoreColumns:
        """[prompt - 1], once complete."""
        return self.slice(1, self._num_prompt_tokens).columns(self.num_listed)

    def slice(self, start: int, end: int) -> TokenScores:
        """Of tokens [start, end), known or not."""
        return self._room(end).slice(start, end)

    def _missing(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Which of the tokens [start, end) list too few alternatives, counted from `start`."""
        missing = np.ones(max(0, end - start), np.bool_)
        known = self._tokens.slice(start, end).lists(self.num_listed)
        missing[: len(known)] = ~known
        return np.flatnonzero(missing)

    def _room(self, num_tokens: int) -> TokenScores:
        """All tokens, with room for so many; grows by half at least."""
        if num_tokens > self._tokens.num_tokens:
            most = max(num_tokens, self._tokens.num_tokens * 3 // 2)
            room = TokenScores.unknown(most, self.num_listed - 1)
            room.fill(0, self._tokens)
            self._tokens = room
        return self._tokens
