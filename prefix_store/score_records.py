"""Scores of the tokens under a lease: read, and recorded within the cell's budget."""

from typing import NamedTuple

from cluster.scores import SCORE_BYTES, TokenScores
from prefix_store.evictor import Evictor
from prefix_store.packed_scores import ScoreOffer, unknown_scores, unpack
from prefix_store.radix_tree import RadixNode, path_from_root
from prefix_store.size_account import PartAccount


class TakenScores(NamedTuple):
    """What of an offer was taken: of how many tokens, and in which blocks, numbered as in the sequence, ascending."""

    num_tokens: int
    blocks: list[int]


class ScoreRecords:
    """The one that puts scores into nodes; the evictor takes them out. What a token has never changes."""

    def __init__(
        self, evictor: Evictor, account: PartAccount, block_size: int, budget_bytes: int
    ) -> None:
        self._evictor = evictor
        self._account = account
        self._block_size = block_size
        self._unknown = unknown_scores(block_size)
        self._block_bytes = block_size * SCORE_BYTES
        self.max_blocks = budget_bytes // self._block_bytes

    @property
    def num_bytes(self) -> int:
        return self._account.stored * self._block_bytes

    def bytes_of(self, num_blocks: int) -> int:
        return num_blocks * self._block_bytes

    def read(self, end_node: RadixNode, start: int, end: int) -> TokenScores:
        """A copy of what is known of tokens [start, end), which end at or before `end_node` does."""
        first_block, end_block = start // self._block_size, -(-end // self._block_size)
        packed = bytearray()
        for node in path_from_root(end_node, first_block):
            first, end_of_node = max(first_block, node.first_block), min(end_block, node.end_block)
            places = range(first - node.first_block, end_of_node - node.first_block)
            packed += b"".join([node.payload.scores.get(p, self._unknown) for p in places])
        skipped = first_block * self._block_size
        return unpack(packed).slice(start - skipped, end - skipped)

    def record(self, end_node: RadixNode, start: int, scores: TokenScores) -> TakenScores:
        """Takes scores of the tokens from `start` on, down to `end_node`, where none is known yet. Blocks without any
        are taken in order, as long as there is room."""
        offer = ScoreOffer(start, scores, self._block_size)
        num_tokens, blocks = 0, list[int]()
        for node in path_from_root(end_node, offer.first_block):
            taken = self._record_in(node, offer)
            num_tokens += taken.num_tokens
            blocks += taken.blocks
        return TakenScores(num_tokens, blocks)

    def _record_in(self, node: RadixNode, offer: ScoreOffer) -> TakenScores:
        first, payload = node.first_block, node.payload
        blocks = offer.blocks_between(first, node.end_block)
        absent, present = blocks, list[int]()
        if payload.scores:
            absent = [block for block in blocks if block - first not in payload.scores]
            present = [block for block in blocks if block - first in payload.scores]
        room = self._evictor.make_score_room(len(absent), self.max_blocks)
        self._account.leased += room
        added = absent[:room]
        num_tokens = payload.add_scores(offer, added, first)
        if not present:
            return TakenScores(num_tokens, added)
        merged = {block: payload.merge_scores(offer, block, first) for block in present}
        changed = [block for block, count in merged.items() if count]
        return TakenScores(num_tokens + sum(merged.values()), sorted(added + changed))
