"""Scores as the tree keeps them: bytes per block, in which a token without a score says so.

Bytes and not an array for each block, whose object would be as large as the scores of its 16 tokens.
"""

import numpy as np

from cluster.scores import SCORE, TokenScores


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
        whole = TokenScores.unknown((self.end_block - self.first_block) * block_size)
        lead = start - self.first_block * block_size
        whole.rows[lead : lead + scores.num_tokens] = scores.rows
        self._packed = whole.rows.tobytes()
        self._block_bytes = block_size * SCORE.itemsize
        self._num_known: list[int] = whole.known.reshape(-1, block_size).sum(axis=1).tolist()

    def blocks_between(self, first_block: int, end_block: int) -> list[int]:
        """Of these, numbered as in the sequence, those with a score, in order."""
        blocks = range(max(first_block, self.first_block), min(end_block, self.end_block))
        return [block for block in blocks if self.num_known(block)]

    def num_known(self, block: int) -> int:
        return self._num_known[block - self.first_block]

    def packed(self, block: int) -> bytes:
        start = (block - self.first_block) * self._block_bytes
        return self._packed[start : start + self._block_bytes]

    def merged(self, record: bytes, block: int) -> tuple[bytes, int]:
        """The record with those of the block's scores that it does not have, and how many these are."""
        rows = bytearray(record)
        taken = unpack(rows).fill(0, unpack(self.packed(block)))
        return bytes(rows), taken
