"""Takes blocks out of the tree, oldest first, and keeps pools, account and queues in step with it."""

from collections.abc import Sequence
from functools import partial

from cluster.types import Rank
from prefix_store.block_pool import BlockPool
from prefix_store.eviction import (
    LruQueue,
    kv_eviction_stamp,
    route_eviction_stamp,
    score_eviction_stamp,
)
from prefix_store.radix_tree import RadixNode, RadixTree
from prefix_store.size_account import SizeAccount


class Evictor:
    """Owner of the queues of candidates. Only unleased nodes are given to it.

    A node is offered whenever it may have become a candidate: its last lease ended, its KV left routes uncovered, or
    its last child, or last child with KV on a rank, went.
    """

    def __init__(self, tree: RadixTree, pools: list[BlockPool], account: SizeAccount) -> None:
        self._tree = tree
        self._pools = pools
        self._account = account
        ranks = [Rank(rank) for rank in range(len(pools))]
        self.kv_queues = [LruQueue(partial(kv_eviction_stamp, rank=rank)) for rank in ranks]
        self.route_queue = LruQueue(route_eviction_stamp)
        self.score_queue = LruQueue(score_eviction_stamp)
        self.kv_blocks_evicted = 0
        """Since start, like the next."""
        self.route_blocks_evicted = 0
        self.score_blocks_evicted = 0

    def offer(self, node: RadixNode) -> None:
        for rank in node.payload.kv:
            self.kv_queues[rank].offer(node)
        self.route_queue.offer(node)
        self.score_queue.offer(node)

    def forget_stale(self) -> None:
        """What is no candidate any more leaves the queues, and with it the memory."""
        for queue in (*self.kv_queues, self.route_queue, self.score_queue):
            queue.drop_stale()

    def evict_oldest_kv(self, rank: Rank, num_blocks: int) -> None:
        """So many KV blocks of this rank, none if negative; the caller knows that they exist."""
        remaining = num_blocks
        while remaining > 0:
            node = self.kv_queues[rank].oldest()
            assert node is not None
            remaining -= self.evict_kv(node, rank, remaining)

    def make_route_room(self, num_blocks: int, max_route_blocks: int) -> int:
        """Evicts routes until so many further blocks fit. Returns how many do: fewer, perhaps none, if the rest is
        leased or under KV."""
        account = self._account.routes
        while (excess := account.stored + num_blocks - max_route_blocks) > 0:
            leaf = self.route_queue.oldest()
            if leaf is None:
                return num_blocks - excess
            self.evict_routes(leaf, excess)
        return num_blocks

    def make_score_room(self, num_bytes: int, max_score_bytes: int) -> int:
        """Evicts scores until so many further bytes fit. Returns how many do: fewer, perhaps none, if the rest is
        leased."""
        account = self._account.scores
        while (excess := account.stored + num_bytes - max_score_bytes) > 0:
            node = self.score_queue.oldest()
            if node is None:
                return num_bytes - excess
            self.evict_scores(node, excess)
        return num_bytes

    def evict_kv(self, node: RadixNode, rank: Rank, num_blocks: int) -> int:
        """Up to so many KV blocks from the node's end; no child has any on this rank. Returns how many."""
        payload = node.payload
        were_covered = payload.num_blocks_with_kv == len(payload.routes)
        block_ids = payload.kv[rank]
        evicted = block_ids[max(len(block_ids) - num_blocks, 0) :]
        del block_ids[len(block_ids) - len(evicted) :]
        self._pools[rank].reclaim(evicted)
        self._account.kv[rank].unleased -= len(evicted)
        self.kv_blocks_evicted += len(evicted)
        if not block_ids:
            self._forget_rank(node, rank)
        if were_covered:
            self.route_queue.offer(node)
        return len(evicted)

    def drop_kv(self, rank: Rank) -> int:
        """All of a rank's blocks, leased nodes' too: its memory is gone. Returns how many."""
        account = self._account.kv[rank]
        num_blocks = account.stored
        for node in self._tree.nodes_bottom_up():
            block_ids = node.payload.kv.get(rank)
            if block_ids is None:
                continue
            self._pools[rank].reclaim(block_ids)
            self._forget_rank(node, rank)
            if not node.num_leases:
                self.route_queue.offer(node)
        account.leased = account.unleased = 0
        return num_blocks

    def evict_routes(self, leaf: RadixNode, num_blocks: int) -> int:
        """Up to so many blocks without KV from the leaf's end, and the leaf if none are left. Returns how many."""
        payload, parent = leaf.payload, leaf.parent
        assert parent is not None
        count = min(num_blocks, len(payload.routes) - payload.num_blocks_with_kv)
        end = len(payload.routes) - count
        if payload.scores:
            self._drop_scores(leaf, [block for block in payload.scores if block >= end])
        self._tree.remove_tail(leaf, count)
        self._account.routes.unleased -= count
        self.route_blocks_evicted += count
        if not leaf.num_blocks:
            self.route_queue.offer(parent)
            self._tree.drop_if_empty(leaf.namespace)
        return count

    def evict_scores(self, node: RadixNode, num_bytes: int) -> int:
        """Of the last blocks of an unleased node, until so many bytes are free or none are left. Returns how many
        bytes went."""
        return self._drop_scores(node, node.payload.last_scored(num_bytes))

    def _drop_scores(self, node: RadixNode, blocks: Sequence[int]) -> int:
        num_bytes = node.payload.drop_scores(blocks)
        self._account.scores.unleased -= num_bytes
        self._account.num_score_blocks -= len(blocks)
        self.score_blocks_evicted += len(blocks)
        return num_bytes

    def _forget_rank(self, node: RadixNode, rank: Rank) -> None:
        """The node has no KV on this rank any more: its parent may be next."""
        parent = node.parent
        assert parent is not None
        del node.payload.kv[rank], node.payload.kv_stamps[rank]
        parent.num_kv_children[rank] -= 1
        if parent.num_kv_children[rank] == 0:
            del parent.num_kv_children[rank]
            self.kv_queues[rank].offer(parent)
