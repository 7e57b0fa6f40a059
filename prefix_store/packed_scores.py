"""Scores as the tree keeps them: bytes per block, in which a token without a score says so. Alternatives after the
first are kept apart, of blocks that have any, with the same number of places for each token.

Bytes and not an array for each block, whose object would be as large as the scores of its 16 tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.scores import ALTERNATIVE, ALTERNATIVE_BYTES, SCORE, SCORE_BYTES, TokenScores
from prefix_store.equal_parts import equal_parts


def unknown_scores(num_tokens: int) -> bytes:
    return TokenScores.unknown(num_tokens).rows.tobytes()


def unpack(packed: bytes | bytearray, further: bytes | None = None) -> TokenScores:
    """A view, which can be written if the bytes can."""
    rows = np.frombuffer(packed, SCORE)
    if further is None:
        return TokenScores(rows)
    return TokenScores(rows, np.frombuffer(further, ALTERNATIVE).reshape(len(rows), -1))


def further_bytes(num_tokens: int, num_further: int) -> int:
    return num_tokens * num_further * ALTERNATIVE_BYTES


class ScoreOffer:
    """A copy of the scores of consecutive tokens, cut at the ends of a sequence's blocks."""

    def __init__(self, start: int, scores: TokenScores, block_size: int) -> None:
        """start: the first token's number in the sequence."""
        end = start + scores.num_tokens
        self.first_block, self.end_block = start // block_size, -(-end // block_size)
        whole = _whole_blocks(start % block_size, scores, block_size)
        num_blocks = self.end_block - self.first_block
        self._packed = equal_parts(whole.rows, num_blocks)
        self._further = [] if whole.further is None else equal_parts(whole.further, num_blocks)
        self._num_known = _num_known(whole.known, block_size)
        self.num_further = whole.num_further
        self.block_bytes = block_size * SCORE_BYTES + further_bytes(block_size, self.num_further)
        """Of a block with what it lists."""

    def blocks_between(self, first_block: int, end_block: int) -> list[int]:
        """Of these, numbered as in the sequence, those with a score, in order."""
        first, known = self.first_block, self._num_known
        blocks = range(max(first_block, first), min(end_block, self.end_block))
        return [block for block in blocks if known[block - first]]

    def num_known(self, blocks: Sequence[int]) -> int:
        """Tokens of these blocks that have a score."""
        first, known = self.first_block, self._num_known
        return sum([known[block - first] for block in blocks])

    def packed(self, blocks: Sequence[int]) -> list[bytes]:
        first, packed = self.first_block, self._packed
        return [packed[block - first] for block in blocks]

    def further(self, blocks: Sequence[int]) -> list[bytes]:
        """Alternatives after the first; of an offer that has any."""
        first, further = self.first_block, self._further
        return [further[block - first] for block in blocks]

    def scores_of(self, block: int) -> TokenScores:
        """A view that nobody can write."""
        place = block - self.first_block
        return unpack(self._packed[place], self._further[place] if self._further else None)


def _whole_blocks(num_before: int, scores: TokenScores, block_size: int) -> TokenScores:
    """With unknown ones before them, and after them up to the end of a block."""
    end = num_before + scores.num_tokens
    num_after = -end % block_size
    if not num_before and not num_after:
        return scores
    whole = TokenScores.unknown(end + num_after, scores.num_further)
    whole.rows[num_before:end] = scores.rows
    if whole.further is not None:
        whole.further[num_before:end] = scores.further
    return whole


def _num_known(known: npt.NDArray[np.bool_], block_size: int) -> list[int]:
    """Block by block. Mostly all are."""
    if known.all():
        return [block_size] * (len(known) // block_size)
    counts: list[int] = known.reshape(-1, block_size).sum(axis=1, dtype=np.int64).tolist()
    return counts
