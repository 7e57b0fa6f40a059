"""Scores: how likely the model held each token of a sequence, given those before it.

All of a token's come from one float32 log-softmax of the raw logits at the position before it: no temperature, no
truncation, no penalty. NaN marks a token without a score: the first of a sequence, and those that nobody asked for.
A token *lists* its alternatives, the most likely tokens in its place: as many as were asked for, at least one.
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
ALTERNATIVE = np.dtype([("token_id", "<i4"), ("logprob", "<f4")])
ALTERNATIVE_BYTES = ALTERNATIVE.itemsize
"""Of each alternative after the first, which SCORE has."""
_NO_ALTERNATIVE = np.array((-1, np.nan), ALTERNATIVE)


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

    def stored(self, num_listed: int = 1) -> "TokenScores":
        """As the store keeps them, with so many alternatives of each token, or those that there are."""
        firsts = (np.cumsum(self.top_lens) - self.top_lens).astype(np.int64)
        rows = np.empty(self.num_tokens, SCORE)
        rows["chosen_logprob"] = self.chosen_logprobs
        rows["chosen_rank"] = self.chosen_ranks
        rows["top_id"] = self.top_ids[firsts]
        rows["top_logprob"] = self.top_logprobs[firsts]
        if num_listed == 1:
            return TokenScores(rows)
        further = no_alternatives(self.num_tokens, num_listed - 1)
        offsets = np.arange(1, num_listed)
        present = offsets < self.top_lens[:, None]
        places = (firsts[:, None] + offsets)[present]
        further["token_id"][present] = self.top_ids[places]
        further["logprob"][present] = self.top_logprobs[places]
        return TokenScores(rows, further)


@dataclass(frozen=True, eq=False, slots=True)
class TokenScores:
    """Scores of T consecutive tokens, as the prefix store keeps them.

    rows: [T] of SCORE: log-prob of the token (NaN where there is none) and its rank, the most likely token there, its
    log-prob
    further: [T, F] of ALTERNATIVE, the most likely tokens after that one, most likely first; token id -1 where a token
    lists fewer. None: no token lists more than one
    """

    rows: npt.NDArray[np.void]
    further: npt.NDArray[np.void] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.rows)

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """[T]"""
        known: npt.NDArray[np.bool_] = ~np.isnan(self.rows["chosen_logprob"])
        return known

    @property
    def num_further(self) -> int:
        """F"""
        return 0 if self.further is None else self.further.shape[1]

    @property
    def num_listed(self) -> npt.NDArray[np.int64]:
        """[T] alternatives of each token, 0 where it has no score."""
        known = self.known.astype(np.int64)
        if self.further is None:
            return known
        count: npt.NDArray[np.int64] = known + (self.further["token_id"] >= 0).sum(axis=1)
        return count

    def lists(self, num_listed: int) -> npt.NDArray[np.bool_]:
        """[T], whether a token has a score with at least so many alternatives."""
        if num_listed == 1:
            return self.known
        if self.further is None or self.num_further < num_listed - 1:
            return np.zeros(self.num_tokens, np.bool_)
        there: npt.NDArray[np.bool_] = self.further["token_id"][:, num_listed - 2] >= 0
        return there

    @staticmethod
    def unknown(num_tokens: int, num_further: int = 0) -> "TokenScores":
        """Arrays of its own, to be filled."""
        rows = np.full(num_tokens, _UNKNOWN, SCORE)
        return TokenScores(rows, no_alternatives(num_tokens, num_further) if num_further else None)

    def slice(self, start: int, end: int) -> "TokenScores":
        """Tokens [start, end) as a view."""
        further = self.further
        return TokenScores(self.rows[start:end], None if further is None else further[start:end])

    def columns(self, num_listed: int = 1) -> ScoreColumns:
        """With so many alternatives each; of tokens that all list them."""
        top_ids, top_logprobs = self.rows["top_id"], self.rows["top_logprob"]
        if num_listed > 1:
            assert self.further is not None
            further = self.further[:, : num_listed - 1]
            top_ids = np.column_stack([top_ids, further["token_id"]]).reshape(-1)
            top_logprobs = np.column_stack([top_logprobs, further["logprob"]]).reshape(-1)
        return ScoreColumns(
            np.ascontiguousarray(self.rows["chosen_logprob"]),
            np.ascontiguousarray(self.rows["chosen_rank"]),
            np.full(self.num_tokens, num_listed, np.int32),
            np.ascontiguousarray(top_ids),
            np.ascontiguousarray(top_logprobs),
        )

    def fill(self, start: int, others: "TokenScores") -> int:
        """Takes others' scores of tokens from `start` on where they list more than it has, as far as it has room for
        them. Those of a token are taken as a whole: what it lists comes from one log-softmax. Nothing else changes.
        Returns how many it took."""
        mine = self.slice(start, start + others.num_tokens)
        if self.further is None:
            taken = ~mine.known & others.known
        else:
            taken = np.minimum(others.num_listed, 1 + self.num_further) > mine.num_listed
        mine.rows[taken] = others.rows[taken]
        if mine.further is not None and others.further is not None:
            width = min(self.num_further, others.num_further)
            mine.further[taken, :width] = others.further[taken, :width]
        return int(taken.sum())


def no_alternatives(num_tokens: int, num_further: int) -> npt.NDArray[np.void]:
    """[T, F] of ALTERNATIVE, an array of its own, to be filled."""
    return np.full((num_tokens, num_further), _NO_ALTERNATIVE, ALTERNATIVE)
