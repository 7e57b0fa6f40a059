"""Scores of one request's tokens: of generated ones always, of the prompt when it was asked.

prompt   0 ── no score, ever ── 1 ········ num_scored_prompt_tokens ········ num_prompt_tokens
                                known: from the store, or its own   |  to be computed
"""

import numpy as np

from cluster.scores import ScoreColumns, TokenScores


class ScoreLog:
    """What is known never changes. More than one alternative is never in the store, so such scores are all its own."""

    def __init__(
        self, num_prompt_tokens: int, capacity: int, *, scores_prompt: bool, num_alternatives: int
    ) -> None:
        """capacity: tokens of prompt and output; num_alternatives: listed with each prompt token, at least 1."""
        self.scores_prompt = scores_prompt
        self.tokens = TokenScores.unknown(capacity)
        self.num_stored = 0
        """Tokens whose scores the store was given, or had."""
        self._num_prompt_tokens = num_prompt_tokens
        self._num_alternatives = num_alternatives
        self._own: list[ScoreColumns] = []

    @property
    def num_scored_prompt_tokens(self) -> int:
        """Up to the first prompt token whose score is asked and missing."""
        if not self.scores_prompt:
            return self._num_prompt_tokens
        missing = np.flatnonzero(~self.tokens.known[1 : self._num_prompt_tokens])
        return int(missing[0]) + 1 if len(missing) else self._num_prompt_tokens

    @property
    def is_complete(self) -> bool:
        """Of the prompt."""
        return self.num_scored_prompt_tokens == self._num_prompt_tokens

    @property
    def takes_stored(self) -> bool:
        """What the store has of the prompt is all that is asked."""
        return self.scores_prompt and self._num_alternatives == 1

    def num_to_score(self, first: int, end: int) -> int:
        """Of the tokens [first, end), put in: for so many, the first ones, the score of the next token is missing."""
        if not self.scores_prompt:
            return 0
        last = min(end, self._num_prompt_tokens - 1)
        missing = np.flatnonzero(~self.tokens.known[first + 1 : last + 1])
        return int(missing[-1]) + 1 if len(missing) else 0

    def add_prompt(self, start: int, scores: ScoreColumns) -> None:
        """Computed for it, of the prompt tokens from `start` on."""
        self.tokens.fill(start, scores.stored())
        if not self.takes_stored:
            self._own.append(scores)

    def add_output(self, position: int, score: ScoreColumns) -> None:
        """score: of this token alone."""
        self.tokens.rows[position] = (
            score.chosen_logprobs[0],
            score.top_ids[0],
            score.top_logprobs[0],
        )

    def prompt_columns(self) -> ScoreColumns:
        """[prompt - 1], once complete."""
        if self.takes_stored:
            return self.tokens.slice(1, self._num_prompt_tokens).columns()
        return ScoreColumns.joined(self._own)
