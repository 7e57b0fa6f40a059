"""Scores of the tokens under a lease: read, and recorded within the cell's budget."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.scores import TokenScores, no_alternatives
from prefix_store.evictor import Evictor
from prefix_store.packed_scores import ScoreOffer, further_bytes, unknown_scores, unpack
from prefix_store.payload import NodePayload
from prefix_store.radix_tree import RadixNode, path_from_root
from prefix_store.size_account import SizeAccount


class TakenScores(NamedTuple):
    """What of an offer was taken: of how many tokens, and in which blocks, numbered as in the sequence, ascending."""

    num_tokens: int
    blocks: list[int]


class ScoreRecords:
    """The one that puts scores into nodes; the evictor takes them out. What a token has changes only for scores that
    list more alternatives."""

    def __init__(
        self, evictor: Evictor, account: SizeAccount, block_size: int, budget_bytes: int
    ) -> None:
        self._evictor = evictor
        self._account = account
        self._block_size = block_size
        self._unknown = unknown_scores(block_size)
        self.max_bytes = budget_bytes

    @property
    def max_blocks(self) -> int:
        """With one alternative of each token."""
        return self.max_bytes // len(self._unknown)

    def read(self, end_node: RadixNode, start: int, end: int, num_listed: int) -> TokenScores:
        """A copy of what is known of tokens [start, end), which end at or before `end_node` does, with up to so many
        alternatives each."""
        size, num_further = self._block_size, num_listed - 1
        first_block, end_block = start // size, -(-end // size)
        packed = bytearray()
        num_tokens = (end_block - first_block) * size
        further = no_alternatives(num_tokens, num_further) if num_further else None
        for node in path_from_root(end_node, first_block):
            first, end_of_node = max(first_block, node.first_block), min(end_block, node.end_block)
            places = range(first - node.first_block, end_of_node - node.first_block)
            packed += b"".join([node.payload.scores.get(p, self._unknown) for p in places])
            if further is not None and node.payload.further:
                begin = (first - first_block) * size
                _read_further(node.payload, places, further[begin : begin + len(places) * size])
        scores = TokenScores(unpack(packed).rows, further)
        return scores.slice(start - first_block * size, end - first_block * size)

    def record(self, end_node: RadixNode, start: int, scores: TokenScores) -> TakenScores:
        """Takes scores of the tokens from `start` on, down to `end_node`, where they list more than is known. Blocks
        without any are taken in order, as long as there is room."""
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
        num_bytes = len(absent) * offer.block_bytes
        room = self._evictor.make_score_room(num_bytes, self.max_bytes) // offer.block_bytes
        self._account.scores.leased += room * offer.block_bytes
        self._account.num_score_blocks += room
        added = absent[:room]
        num_tokens = payload.add_scores(offer, added, first)
        if not present:
            return TakenScores(num_tokens, added)
        merged = {b: self._merge(payload, b - first, offer, b) for b in present}
        changed = [block for block, count in merged.items() if count]
        return TakenScores(num_tokens + sum(merged.values()), sorted(added + changed))

    def _merge(self, payload: NodePayload, place: int, offer: ScoreOffer, block: int) -> int:
        """Into the scores that the block has: as many alternatives as are offered if there is room for them, else as
        many as it has. Returns how many tokens' were taken."""
        known, offered = payload.scores_of(place), offer.scores_of(block)
        for num_further in sorted({known.num_further, offered.num_further}, reverse=True):
            if num_further < known.num_further:
                break
            merged = TokenScores.unknown(self._block_size, num_further)
            merged.fill(0, known)
            taken = merged.fill(0, offered)
            growth = further_bytes(self._block_size, num_further - known.num_further)
            if taken and self._evictor.make_score_room(growth, self.max_bytes) == growth:
                self._account.scores.leased += growth
                payload.replace_scores(place, merged)
                return taken
        return 0


def _read_further(payload: NodePayload, places: range, further: npt.NDArray[np.void]) -> None:
    """further: [tokens of these blocks, F], filled with what the node's blocks list, as far as it has room."""
    size = len(further) // max(1, len(places))
    for number, place in enumerate(places):
        record = payload.further.get(place)
        if record is not None:
            listed = unpack(payload.scores[place], record).further
            assert listed is not None
            width = min(further.shape[1], listed.shape[1])
            further[number * size : (number + 1) * size, :width] = listed[:, :width]
