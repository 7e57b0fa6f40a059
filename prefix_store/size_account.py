"""Running counts of what the tree holds, split by whether a lease protects it. Counts only."""

from collections.abc import Iterable

from cluster.types import Rank
from prefix_store.radix_tree import RadixNode


class PartAccount:
    """Blocks of one payload part, bytes of scores. stored = leased + unleased, none negative, at every step."""

    def __init__(self) -> None:
        self.leased = 0
        self.unleased = 0

    @property
    def stored(self) -> int:
        return self.leased + self.unleased

    def lease(self, number: int) -> None:
        self.leased += number
        self.unleased -= number


class SizeAccount:
    """Accounts of a store: KV per rank, routes, scores. New blocks enter leased; only unleased ones leave."""

    def __init__(self, num_ranks: int) -> None:
        self.kv = [PartAccount() for _ in range(num_ranks)]
        self.routes = PartAccount()
        self.scores = PartAccount()
        self.num_score_blocks = 0
        """That have some."""

    def nodes_leased(self, nodes: Iterable[RadixNode]) -> None:
        """Nodes got their first lease."""
        self._lease(nodes, 1)

    def nodes_unleased(self, nodes: Iterable[RadixNode]) -> None:
        """Nodes lost their last lease."""
        self._lease(nodes, -1)

    def _lease(self, nodes: Iterable[RadixNode], sign: int) -> None:
        num_routes = num_score_bytes = 0
        num_kv = [0] * len(self.kv)
        for node in nodes:
            payload = node.payload
            num_routes += node.num_blocks
            num_score_bytes += payload.score_bytes
            for rank, block_ids in payload.kv.items():
                num_kv[rank] += len(block_ids)
        self.routes.lease(sign * num_routes)
        self.scores.lease(sign * num_score_bytes)
        for part, num_blocks in zip(self.kv, num_kv, strict=True):
            part.lease(sign * num_blocks)

    def num_evictable_kv(self, rank: Rank) -> int:
        """All unleased KV blocks: below an unleased node nothing is leased, so each can go, the lowest first."""
        return self.kv[rank].unleased
