"""Scores: how likely the model held each token of a sequence, given those before it.

All of a token's come from one float32 log-softmax of the raw logits at the position before it: no temperature, no
truncation, no penalty. NaN marks a token without a score: the first of a sequence, and those that nobody asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

SCORE = np.dtype(
    [
        ("chosen_logprob", "<f4"),
        ("chosen_rank", "<i4"),
        ("top_id", "<i4"),
        ("top_logprob", "<f4"),
    ]
)
SCORE_BYTES = SCORE.itemsize
"""Per token."""
_UNKNOWN = np.array((np.nan, 0, -1, np.nan), SCORE)


class ScoreColumns(msgspec.Struct, frozen=True):
    """Scores of n tokens as they cross processes, with as many alternatives for each as were asked for."""

    chosen_logprobs: np.ndarray
    """[n] float32, of the token that the sequence goes on with."""
    chosen_ranks: np.ndarray
    """[n] int32, from 1: its place in the vocabulary, the most likely first, equal ones by rising id."""
    top_lens: np.ndarray
    """[n] int32, at least 1."""
    top_ids: np.ndarray
    """[sum of top_lens] int32, most likely first, equal ones by rising id."""
    top_logprobs: np.ndarray
    """[sum of top_lens] float32"""

    @property
    def num_tokens(self) -> int:
        return len(self.chosen_logprobs)

    @staticmethod
    def empty() -> "ScoreColumns":
        ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return ScoreColumns(floats, ints, ints, ints, floats)

    @staticmethod
    def joined(parts: Sequence["ScoreColumns"]) -> "ScoreColumns":
        """One after the other."""
        if not parts:
            return ScoreColumns.empty()
        return ScoreColumns(
            np.concatenate([part.chosen_logprobs for part in parts]),
            np.concatenate([part.chosen_ranks for part in parts]),
            np.concatenate([part.top_lens for part in parts]),
            np.concatenate([part.top_ids for part in parts]),
            np.concatenate([part.top_logprobs for part in parts]),
        )

    def slice(self, start: int, end: int) -> "ScoreColumns":
        """Tokens [start, end) as views."""
        ends = np.concatenate(([0], np.cumsum(self.top_lens)))
        first, last = int(ends[start]), int(ends[end])
        return ScoreColumns(
            self.chosen_logprobs[start:end],
            self.chosen_ranks[start:end],
            self.top_lens[start:end],
            self.top_ids[first:last],
            self.top_logprobs[first:last],
        )

    def alternatives(self, token: int) -> list[tuple[int, float]]:
        """Ids and log-probs of one token's alternatives."""
        one = self.slice(token, token + 1)
        return list(zip(one.top_ids.tolist(), one.top_logprobs.tolist(), strict=True))

    def split(self) -> list["ScoreColumns"]:
        """Token by token, as views."""
        ends = np.cumsum(self.top_lens).tolist()
        return [
            ScoreColumns(
                self.chosen_logprobs[token : token + 1],
                self.chosen_ranks[token : token + 1],
                self.top_lens[token : token + 1],
                self.top_ids[start:end],
                self.top_logprobs[start:end],
            )
            for token, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]

    def stored(self) -> "TokenScores":
        """What the store keeps of them."""
        firsts = (np.cumsum(self.top_lens) - self.top_lens).astype(np.int64)
        rows = np.empty(self.num_tokens, SCORE)
        rows["chosen_logprob"] = self.chosen_logprobs
        rows["chosen_rank"] = self.chosen_ranks
        rows["top_id"] = self.top_ids[firsts]
        rows["top_logprob"] = self.top_logprobs[firsts]
        return TokenScores(rows)


@dataclass(frozen=True, eq=False, slots=True)
class TokenScores:
    """Scores of T consecutive tokens, as the prefix store keeps them.

    rows: [T] of SCORE: log-prob of the token (NaN where there is none) and its rank, the most likely token there, its
    log-prob
    """

    rows: npt.NDArray[np.void]

    @property
    def num_tokens(self) -> int:
        return len(self.rows)

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """[T]"""
        known: npt.NDArray[np.bool_] = ~np.isnan(self.rows["chosen_logprob"])
        return known

    @staticmethod
    def unknown(num_tokens: int) -> "TokenScores":
        """An array of its own, to be filled."""
        return TokenScores(np.full(num_tokens, _UNKNOWN, SCORE))

    def slice(self, start: int, end: int) -> "TokenScores":
        """Tokens [start, end) as a view."""
        return TokenScores(self.rows[start:end])

    def columns(self) -> ScoreColumns:
        """With one alternative each; of tokens that are all known."""
        return ScoreColumns(
            np.ascontiguousarray(self.rows["chosen_logprob"]),
            np.ascontiguousarray(self.rows["chosen_rank"]),
            np.ones(self.num_tokens, np.int32),
            np.ascontiguousarray(self.rows["top_id"]),
            np.ascontiguousarray(self.rows["top_logprob"]),
        )

    def fill(self, start: int, others: "TokenScores") -> int:
        """Takes others' scores of tokens from `start` on where it has none; what it has never changes. Returns how
        many it took."""
        mine = self.slice(start, start + others.num_tokens)
        taken = ~mine.known & others.known
        mine.rows[taken] = others.rows[taken]
        return int(taken.sum())
