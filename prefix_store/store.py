"""The joint prefix store: one radix tree in which KV blocks, expert routes and scores live, are leased and evicted.

Ties tree, pools and eviction together. Single writer: the engine. Time is a counter of uses, never a clock.
"""

import numpy as np
import numpy.typing as npt

from cluster.errors import StoreError
from cluster.prefix_match import (
    Eviction,
    Lease,
    PrefixMatch,
    Publication,
    PublishOutcome,
    StoreStats,
)
from cluster.routes import ExpertRoutes, RouteShape
from cluster.scores import TokenScores
from cluster.types import BlockId, EvictTarget, Namespace, Rank
from prefix_store.block_pool import BlockPool
from prefix_store.commanded_eviction import BlockBytes, evict_part
from prefix_store.evictor import Evictor
from prefix_store.invariants import InvariantCheck
from prefix_store.journal.restoring import RestoredTree
from prefix_store.journal.store_journal import NoJournal, Settled, StoreJournal
from prefix_store.lease import LeasedPath
from prefix_store.offer import Offer
from prefix_store.packed_routes import PackedRoutes
from prefix_store.payload import NodePayload
from prefix_store.publish_rules import check_route_budget, check_sequence, may_publish, private
from prefix_store.radix_tree import BlockKeys, RadixNode, RadixTree, TreePath, path_from_root
from prefix_store.score_records import ScoreRecords
from prefix_store.size_account import SizeAccount

TokenIds = npt.NDArray[np.int32]
_INT32 = np.dtype(np.int32)


class PrefixStore:
    """Owner of all KV block ids of a cell and of every route and score record.

    A prefix of one namespace, in blocks (B tokens each), on one rank:

        0 ········ kv on this rank ········ routes ········ end of the path
        lease   [──────────────────)                 whole nodes, ends where one ends

    An unleased KV block is evictable: whatever is below it is unleased too and can go first. KV and routes are evicted
    from the end of a path, least recently used first; a use ends with `release`, which sets the stamps of the path
    (KV only for ranks that the lease read or wrote).
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        num_kv_blocks: int,
        block_size: int,
        route_shape: RouteShape,
        route_budget_bytes: int,
        score_budget_bytes: int,
        kv_bytes_per_block: int,
        journal: StoreJournal | None = None,
    ) -> None:
        """num_kv_blocks is per rank, the budgets of routes and scores are the cell's. Raises ConfigError if routes of
        all KV that the ranks can hold would not fit: then KV would have to go for want of routes."""
        self._block_size = block_size
        self._route_shape = route_shape
        self._route_block_bytes = block_size * route_shape.bytes_per_token
        self._max_route_blocks = route_budget_bytes // self._route_block_bytes
        self._kv_bytes_per_block = kv_bytes_per_block
        check_route_budget(num_ranks * num_kv_blocks, self._route_block_bytes, route_budget_bytes)
        ranks = [Rank(rank) for rank in range(num_ranks)]
        self._tree = RadixTree(block_size)
        self._pools = [BlockPool(rank, num_kv_blocks) for rank in ranks]
        self._account = SizeAccount(num_ranks)
        self._evictor = Evictor(self._tree, self._pools, self._account)
        self._scores = ScoreRecords(self._evictor, self._account, block_size, score_budget_bytes)
        self._journal: StoreJournal = journal or NoJournal()
        self._leases: dict[Lease, LeasedPath] = {}
        self._now = 0

    def match(self, namespace: Namespace, token_ids: TokenIds) -> PrefixMatch:
        """How many tokens of full blocks have KV (per rank) and routes. Does not mutate."""
        path = self._find(namespace, self._keys(token_ids))
        num_kv_blocks = [0] * len(self._pools)
        for node in path.nodes:
            for rank, block_ids in node.payload.kv.items():
                num_kv_blocks[rank] += len(block_ids)
        size, end = self._block_size, path.end_block
        num_kv_tokens = tuple([min(number, end) * size for number in num_kv_blocks])
        return PrefixMatch(namespace, end * size, num_kv_tokens)

    def acquire(self, namespace: Namespace, token_ids: TokenIds, num_tokens: int) -> Lease:
        """Protects the first `num_tokens` of the path until `release`; splits the node in which they end.

        Raises StoreError if they are no whole number of blocks or not all in the tree.
        """
        num_blocks, rest = divmod(num_tokens, self._block_size)
        if rest or not 0 <= num_tokens <= len(token_ids):
            raise StoreError(
                f"a lease of {num_tokens} of {len(token_ids)} tokens: it must cover whole blocks of "
                f"{self._block_size} tokens of the sequence"
            )
        keys = self._keys(token_ids[:num_tokens])
        path = self._find(namespace, keys)
        if path.end_block < num_blocks:
            raise StoreError(
                f"a lease of {num_tokens} tokens, but the store holds "
                f"{path.end_block * self._block_size} of them: match again before acquiring"
            )
        node = self._count_lease(path, self._tree.ensure_root(namespace), above=None)
        lease = Lease(namespace, num_tokens)
        self._leases[lease] = LeasedPath(node, keys)
        return lease

    def release(self, lease: Lease) -> None:
        """Ends the protection and stamps the path as just used. Raises StoreError if the lease has been released."""
        path = self._held(lease)
        del self._leases[lease]
        self._now += 1
        self._stamp(path_from_root(path.end_node), path.ranks)
        unleased = self._tree.release(path.end_node)
        self._account.nodes_unleased(unleased)
        for node in unleased:
            self._evictor.offer(node)
        self._tree.drop_if_empty(lease.namespace)

    def kv_block_ids(self, lease: Lease, rank: Rank, num_tokens: int) -> list[BlockId]:
        """The tree's blocks of this rank for the first `num_tokens`; valid while the lease is held.

        Marks the rank as used by the lease. Raises StoreError if the lease or the rank's KV is shorter.
        """
        path = self._held(lease)
        self._check_rank(rank)
        num_blocks, rest = divmod(num_tokens, self._block_size)
        block_ids: list[BlockId] = []
        for node in path_from_root(path.end_node):
            block_ids.extend(node.payload.kv.get(rank, ()))
        if rest or not 0 <= num_blocks <= len(block_ids):
            raise StoreError(
                f"KV of {num_tokens} tokens asked of rank {rank}: under this lease of {lease.num_tokens} "
                f"it holds {len(block_ids)} blocks of {self._block_size}"
            )
        path.ranks.add(rank)
        return block_ids[:num_blocks]

    def routes(self, lease: Lease, start: int, end: int) -> ExpertRoutes:
        """Routes of tokens [start, end) under the lease; a copy that nobody can write, valid for ever. Does not
        mutate. Raises StoreError if the range leaves the lease."""
        path = self._held_range(lease, start, end)
        first_block, end_block = start // self._block_size, -(-end // self._block_size)
        packed = PackedRoutes()
        for node in path_from_root(path.end_node, first_block):
            packed.extend(node.routes_between(first_block, end_block))
        skipped = first_block * self._block_size
        return packed.unpack(self._route_shape).slice(start - skipped, end - skipped)

    def publish(
        self,
        lease: Lease,
        rank: Rank,
        token_ids: TokenIds,
        first_block: int,
        block_ids: list[BlockId],
        routes: ExpertRoutes,
    ) -> Publication:
        """Offers consecutive full blocks from `first_block` on, computed into `block_ids` with exactly these routes.

        token_ids is the whole sequence so far, routes those of the blocks' tokens. The lease grows over what is
        published:

            blocks   0 ······ first_block ······ present, equal ids ······ absent ······ no room
            lease    [────────────────)     ──►  [───────────────────────────────)
            outcome                   added or duplicate             added         private

        All are "private" if the blocks before first_block are not leased with KV on this rank, or after a conflict
        under this lease. Raises StoreError, and changes nothing, for lengths, shapes, tokens or block owners that do
        not belong together.
        """
        offer = Offer(self._keys(token_ids), rank, first_block, block_ids, routes)
        path = self._held(lease)
        self._check_rank(rank)
        offer.check(self._block_size, self._route_shape)
        self._pools[rank].require_request_owned(block_ids)
        check_sequence(path, offer.keys)
        if not may_publish(path, offer):
            return Publication(private(offer.num_blocks), conflict=False)
        packed = PackedRoutes.pack(routes, offer.num_blocks)
        recorded = self._recorded_routes(path, offer)
        self._now += 1
        path.keys = offer.keys
        path.ranks.add(rank)
        num_equal = packed.num_equal(recorded)
        outcomes = self._add_kv(path, offer, num_equal)
        path.conflicted = num_equal < len(recorded)
        if not path.conflicted:
            outcomes += self._add_blocks(path, offer, packed.part(num_equal, offer.num_blocks))
        lease.num_tokens = path.end_block * self._block_size
        outcomes += private(offer.num_blocks - len(outcomes))
        return Publication(tuple(outcomes), path.conflicted)

    def scores(self, lease: Lease, start: int, end: int, num_listed: int = 1) -> TokenScores:
        """A copy of what is known of tokens [start, end) under the lease, with up to so many alternatives of each.
        Raises StoreError if the range leaves it."""
        path = self._held_range(lease, start, end)
        return self._scores.read(path.end_node, start, end, num_listed)

    def record_scores(self, lease: Lease, start: int, scores: TokenScores) -> int:
        """Scores of the tokens from `start` on, under the lease: taken where they list more than is known, as long as
        the score budget has room. Returns how many were taken. Raises StoreError if the range leaves the lease."""
        path = self._held_range(lease, start, start + scores.num_tokens)
        taken = self._scores.record(path.end_node, start, scores)
        if taken.blocks:
            self._journal.scores_added(path, taken.blocks, self._now)
        return taken.num_tokens

    def allocate(self, rank: Rank, num_blocks: int) -> list[BlockId] | None:
        """Blocks for a request, evicting unleased KV of this rank if needed; None, and no change, if impossible."""
        self._check_rank(rank)
        if num_blocks < 0:
            raise StoreError(f"{num_blocks} blocks asked for")
        if num_blocks > self.num_allocatable(rank):
            return None
        self._evictor.evict_oldest_kv(rank, num_blocks - self._pools[rank].num_free)
        return self._pools[rank].allocate(num_blocks)

    def drop_kv(self, rank: Rank) -> int:
        """The rank's memory is gone, and all KV that the tree has there; routes and scores stay. Returns the number of
        blocks. Raises StoreError while a lease reads or writes KV of the rank."""
        self._check_rank(rank)
        num_users = sum(rank in path.ranks for path in self._leases.values())
        if num_users:
            raise StoreError(f"KV of rank {rank} dropped while {num_users} leases use it")
        return self._evictor.drop_kv(rank)

    def free(self, rank: Rank, block_ids: list[BlockId]) -> None:
        """A request's blocks go back. Raises StoreError, and changes nothing, if one is free or the tree's."""
        self._check_rank(rank)
        self._pools[rank].free(block_ids)

    def num_allocatable(self, rank: Rank) -> int:
        """Blocks that `allocate` could give now: free and evictable ones. Does not mutate."""
        self._check_rank(rank)
        return self._pools[rank].num_free + self._account.num_evictable_kv(rank)

    def evict(self, part: EvictTarget) -> Eviction:
        """Evicts a part of every unleased node; "routes" take KV and scores along, and so are the same as "all"."""
        sizes = BlockBytes(self._kv_bytes_per_block, self._route_block_bytes)
        eviction = evict_part(self._tree, self._evictor, part, sizes)
        if part != "kv":
            self._journal.evicted()
        return eviction

    def exchange_weights(self, model_fingerprint: str) -> Eviction:
        """Evicts what other weights have made; what is kept on disk from now on is of these."""
        self._journal.served(model_fingerprint)
        return self.evict("all")

    def load(self) -> None:
        """What the journal has kept, into an empty store, as far as the budgets go: routes and scores, the last used
        first. Raises ConfigError if it cannot be read."""
        self._now = self._journal.load(
            RestoredTree(self._tree, self._account, self._evictor),
            max_route_blocks=self._max_route_blocks,
            max_score_blocks=self._scores.max_blocks,
        )

    def upkeep(self) -> float | None:
        """A slice of what the journal has to do beside steps. Returns in how many seconds it has more, at the latest;
        None: when something is published or evicted."""
        account = self._account
        return self._journal.upkeep(self._tree, account.routes.stored, account.num_score_blocks)

    def when_settled(self, settled: Settled) -> None:
        """Calls it, perhaps in an `upkeep`, once what was evicted so far is gone from disk too: with an empty string,
        or with why it may not be."""
        self._journal.when_settled(settled)

    def close(self, timeout_seconds: float) -> None:
        """Everything that was published is on disk then, or that took too long."""
        self._journal.close(timeout_seconds)

    def stats(self) -> StoreStats:
        """A snapshot. Does not mutate."""
        kv = self._account.kv
        return StoreStats(
            num_nodes=self._tree.num_nodes,
            kv_blocks_free=tuple(pool.num_free for pool in self._pools),
            kv_blocks_used=tuple(pool.num_blocks - pool.num_free for pool in self._pools),
            kv_blocks_leased=sum(part.leased for part in kv),
            kv_bytes=sum(part.stored for part in kv) * self._kv_bytes_per_block,
            route_bytes=self._account.routes.stored * self._route_block_bytes,
            score_bytes=self._account.scores.stored,
            kv_blocks_evicted=self._evictor.kv_blocks_evicted,
            route_blocks_evicted=self._evictor.route_blocks_evicted,
            score_blocks_evicted=self._evictor.score_blocks_evicted,
            state=self._journal.state(),
        )

    def check_invariants(self) -> None:
        """Raises AssertionError with a drawing of the tree. O(size of the store); for tests and idle times."""
        check = InvariantCheck(self._tree, self._block_size)
        check.shape()
        check.scores()
        check.kv_is_contiguous()
        check.leases(
            (lease.namespace, path.end_node, lease.num_tokens // self._block_size)
            for lease, path in self._leases.items()
        )
        check.ownership(self._pools)
        check.accounts(self._account, self._pools)
        check.queues(self._evictor)
        check.budgets(self._account, self._max_route_blocks, self._scores.max_bytes)

    def _keys(self, token_ids: TokenIds) -> BlockKeys:
        if token_ids.dtype != _INT32 or token_ids.ndim != 1:
            raise StoreError(
                f"token ids must be [n] int32, got {token_ids.ndim}-d {token_ids.dtype}"
            )
        return BlockKeys(token_ids, self._block_size)

    def _held(self, lease: Lease) -> LeasedPath:
        if lease not in self._leases:
            raise StoreError(
                f"the lease of {lease.num_tokens} tokens of {lease.namespace} was released, or is "
                "another store's"
            )
        return self._leases[lease]

    def _held_range(self, lease: Lease, start: int, end: int) -> LeasedPath:
        if not 0 <= start <= end <= lease.num_tokens:
            raise StoreError(f"tokens [{start}, {end}) under a lease of {lease.num_tokens} tokens")
        return self._held(lease)

    def _check_rank(self, rank: Rank) -> None:
        if not 0 <= rank < len(self._pools):
            raise StoreError(f"rank {rank} of a store for ranks 0 to {len(self._pools) - 1}")

    def _find(self, namespace: Namespace, keys: BlockKeys) -> TreePath:
        root = self._tree.root(namespace)
        return TreePath([], 0) if root is None else self._tree.descend(root, keys, len(keys))

    # Leases

    def _count_lease(self, path: TreePath, start: RadixNode, above: RadixNode | None) -> RadixNode:
        """Counts a lease that ends with the path below `start`, and returns its end, split off where that lies inside a
        node."""
        node = path.nodes[-1] if path.nodes else start
        if path.end_block < node.end_block:
            node = self._tree.split(node, path.end_block - node.first_block)
        self._account.nodes_leased(self._tree.acquire(node, above))
        return node

    def _grow_lease(self, path: LeasedPath, keys: BlockKeys, end_block: int) -> None:
        """Over blocks that are in the tree."""
        further = self._tree.descend(path.end_node, keys, end_block)
        path.end_node = self._count_lease(further, path.end_node, above=path.end_node)

    def _stamp(self, nodes: list[RadixNode], ranks: set[Rank]) -> None:
        for node in nodes:
            node.payload.route_stamp = self._now
            for rank in ranks & node.payload.kv.keys():
                node.payload.kv_stamps[rank] = self._now

    # Publishing

    def _recorded_routes(self, path: LeasedPath, offer: Offer) -> PackedRoutes:
        """Routes of those offered blocks that are in the tree: under the lease, then below its end."""
        below = self._tree.descend(path.end_node, offer.keys, offer.end_block)
        end_block = min(max(below.end_block, path.end_block), offer.end_block)
        recorded = PackedRoutes()
        for node in (*path_from_root(path.end_node, offer.first_block), *below.nodes):
            recorded.extend(node.routes_between(offer.first_block, end_block))
        return recorded

    def _add_kv(self, path: LeasedPath, offer: Offer, num_blocks: int) -> list[PublishOutcome]:
        """The first offered blocks, which are in the tree with equal ids: leased, and taken where the rank has no KV
        yet."""
        outcomes: list[PublishOutcome] = []
        if not num_blocks:
            return outcomes
        end_block = offer.first_block + num_blocks
        self._grow_lease(path, offer.keys, end_block)
        for node in path_from_root(path.end_node, offer.first_block):
            first, end = max(offer.first_block, node.first_block), min(end_block, node.end_block)
            with_kv = node.first_block + node.payload.num_kv_blocks(offer.rank)
            absent = min(max(first, with_kv), end)
            self._give(node, offer.rank, offer.ids_of(absent, end))
            outcomes.extend(["duplicate"] * (absent - first))
            outcomes.extend(["added"] * (end - absent))
        return outcomes

    def _add_blocks(
        self, path: LeasedPath, offer: Offer, routes: PackedRoutes
    ) -> list[PublishOutcome]:
        """The last offered blocks, which the tree does not have, as long as their routes find room."""
        room = self._evictor.make_route_room(len(routes), self._max_route_blocks)
        if not room:
            return []
        first = offer.end_block - len(routes)
        added = routes.part(0, room)
        self._journal.routes_added(path, first, added, self._now)
        self._append(path, offer.keys.run(first, first + room), added)
        self._give(path.end_node, offer.rank, offer.ids_of(first, first + room))
        return ["added"] * room

    def _append(self, path: LeasedPath, edge: bytes, routes: PackedRoutes) -> None:
        """Blocks after the lease's end: in its last node if that is a leaf and nobody else's lease would grow with
        it, else in a child."""
        node = path.end_node
        if node.children or node.num_leases > 1 or node.parent is None:
            child = self._tree.add_child(node, edge, NodePayload(self._now, routes))
            self._tree.acquire(child, above=node)
            path.end_node = child
        else:
            self._tree.extend(node, edge, routes)
        self._account.routes.leased += len(routes)

    def _give(self, node: RadixNode, rank: Rank, block_ids: list[BlockId]) -> None:
        """A request's blocks become the tree's, as the next KV blocks of a leased node."""
        if not block_ids:
            return
        assert node.num_leases > 0
        if rank not in node.payload.kv:
            assert node.parent is not None
            node.payload.kv[rank] = []
            node.parent.num_kv_children[rank] = node.parent.num_kv_children.get(rank, 0) + 1
        node.payload.kv[rank] += block_ids
        node.payload.kv_stamps[rank] = self._now
        self._pools[rank].give_to_tree(block_ids)
        self._account.kv[rank].leased += len(block_ids)
