"""Scores as the tree keeps them: bytes per block, in which a token without a score says so.

Bytes and not an array for each block, whose object would be as large as the scores of its 16 tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.scores import SCORE, TokenScores
from prefix_store.equal_parts import equal_parts


def unknown_scores(num_tokens: int) -> bytes:
    return TokenScores.unknown(num_tokens).rows.tobytes()


def unpack(packed: bytes | bytearray) -> TokenScores:
    """A view, which can be written if the bytes can."""
    return TokenScores(np.frombuffer(packed, SCORE))


class ScoreOffer:
    """A copy of the scores of consecutive tokens, cut at the ends of a sequence's blocks."""

    def __init__(self, start: int, scores: TokenScores, block_size: int) -> None:
        """start: the first token's number in the sequence."""
        end = start + scores.num_tokens
        self.first_block, self.end_block = start // block_size, -(-end // block_size)
        whole = _whole_blocks(start % block_size, scores, block_size)
        self._packed = equal_parts(whole.rows, self.end_block - self.first_block)
        self._num_known = _num_known(whole.known, block_size)

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

    def merged(self, record: bytes, block: int) -> tuple[bytes, int]:
        """The record with those of the block's scores that it does not have, and how many these are."""
        rows = bytearray(record)
        taken = unpack(rows).fill(0, unpack(*self.packed([block])))
        return bytes(rows), taken


def _whole_blocks(num_before: int, scores: TokenScores, block_size: int) -> TokenScores:
    """With unknown ones before them, and after them up to the end of a block."""
    end = num_before + scores.num_tokens
    num_after = -end % block_size
    if not num_before and not num_after:
        return scores
    whole = TokenScores.unknown(end + num_after)
    whole.rows[num_before:end] = scores.rows
    return whole


def _num_known(known: npt.NDArray[np.bool_], block_size: int) -> list[int]:
    """Block by block. Mostly all are."""
    if known.all():
        return [block_size] * (len(known) // block_size)
    counts: list[int] = known.reshape(-1, block_size).sum(axis=1, dtype=np.int64).tolist()
    return counts
