"""Running counts of what the tree holds, split by whether a lease protects it. Counts only, no nodes."""

from cluster.types import Rank
from prefix_store.payload import NodePayload


class PartAccount:
    """Blocks of one payload part. stored = leased + unleased, none negative, at every step."""

    def __init__(self) -> None:
        self.leased = 0
        self.unleased = 0

    @property
    def stored(self) -> int:
        return self.leased + self.unleased

    def lease(self, num_blocks: int) -> None:
        self.leased += num_blocks
        self.unleased -= num_blocks


class SizeAccount:
    """Accounts of a store: KV per rank, routes, scores. New blocks enter leased; only unleased ones leave."""

    def __init__(self, num_ranks: int) -> None:
        self.kv = [PartAccount() for _ in range(num_ranks)]
        self.routes = PartAccount()
        self.scores = PartAccount()

    def node_leased(self, payload: NodePayload) -> None:
        """A node got its first lease."""
        self.routes.lease(len(payload.routes))
        self.scores.lease(len(payload.scores))
        for rank, block_ids in payload.kv.items():
            self.kv[rank].lease(len(block_ids))

    def node_unleased(self, payload: NodePayload) -> None:
        """A node lost its last lease."""
        self.routes.lease(-len(payload.routes))
        self.scores.lease(-len(payload.scores))
        for rank, block_ids in payload.kv.items():
            self.kv[rank].lease(-len(block_ids))

    def num_evictable_kv(self, rank: Rank) -> int:
        """All unleased KV blocks: below an unleased node nothing is leased, so each can go, the lowest first."""
        return self.kv[rank].unleased
