"""What must hold of a store between two calls, checked from scratch, with a drawing of the tree that broke it."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from cluster.types import Namespace, Rank
from prefix_store.block_pool import BlockOwner, BlockPool
from prefix_store.eviction import (
    LruQueue,
    kv_eviction_stamp,
    oldest_by_scan,
    route_eviction_stamp,
    score_eviction_stamp,
)
from prefix_store.evictor import Evictor
from prefix_store.packed_scores import unpack
from prefix_store.radix_tree import RadixNode, RadixTree
from prefix_store.size_account import SizeAccount


def draw(tree: RadixTree) -> str:
    """One line per node: block range, leases, KV block ids per rank."""
    lines = []
    for root in tree.roots():
        lines.append(f"{root.namespace[:12]} leases={root.num_leases}")
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            kv = " ".join(f"kv[{rank}]={ids}" for rank, ids in sorted(node.payload.kv.items()))
            indent = "  " * (_depth(node))
            lines.append(
                f"{indent}[{node.first_block}, {node.end_block}) leases={node.num_leases} {kv}"
            )
            stack.extend(node.children.values())
    return "\n".join(lines)


class InvariantCheck:
    """One check of one tree; `require` raises AssertionError with the drawing."""

    def __init__(self, tree: RadixTree, block_size: int) -> None:
        self._tree = tree
        self._block_size = block_size
        self._nodes = tree.nodes_bottom_up()

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            raise AssertionError(f"{what}\n{draw(self._tree)}")

    def shape(self) -> None:
        """Keys, links and lengths: every node's parts cover exactly its blocks."""
        self.require(len(self._nodes) == self._tree.num_nodes, "the node count is off")
        block_bytes = 4 * self._block_size
        for node in self._nodes:
            at, parent = f"node at block {node.first_block}", node.parent
            assert parent is not None
            self.require(node.num_blocks > 0, f"{at} holds no blocks")
            self.require(len(node.edge) == node.num_blocks * block_bytes, f"{at}: an edge's size")
            key = bytes(node.edge[:block_bytes])
            self.require(parent.children.get(key) is node, f"{at} is not its parent's child")
            self.require(node.first_block == parent.end_block, f"{at} does not follow its parent")
            routes = node.payload.routes
            for part in (routes.topk_ids, routes.topk_weights):
                self.require(len(part) == node.num_blocks, f"{at}: a block without routes")
                self.require(len(set(map(len, part))) == 1, f"{at}: routes of a wrong length")

    def scores(self) -> None:
        """Only of blocks that the node has, of whole blocks, and never of no token."""
        for node in self._nodes:
            at = f"node at block {node.first_block}"
            payload = node.payload
            for block, record in payload.scores.items():
                self.require(0 <= block < node.num_blocks, f"{at}: scores of no block")
                scores = unpack(record, payload.further.get(block))
                self.require(scores.num_tokens == self._block_size, f"{at}: scores of a part")
                self.require(bool(scores.known.any()), f"{at}: scores of no token")
                if scores.further is not None:
                    there = scores.further["token_id"] >= 0
                    gaps = (there[:, 1:] & ~there[:, :-1]).any() or there[~scores.known].any()
                    self.require(not gaps, f"{at}: alternatives behind a gap, or of no token")
            self.require(payload.further.keys() <= payload.scores.keys(), f"{at}: alternatives")
            num_bytes = sum(map(len, (*payload.scores.values(), *payload.further.values())))
            self.require(payload.score_bytes == num_bytes, f"{at}: the size of its scores is off")

    def kv_is_contiguous(self) -> None:
        """kv[rank] is a prefix of a node's blocks, and only below a parent that has all of its own."""
        for node in self._nodes:
            parent = node.parent
            assert parent is not None
            self.require(
                node.payload.kv.keys() == node.payload.kv_stamps.keys(), "a KV stamp is off"
            )
            for rank, block_ids in node.payload.kv.items():
                at = f"rank {rank}, node at block {node.first_block}"
                self.require(0 < len(block_ids) <= node.num_blocks, f"{at}: KV without routes")
                above = parent.payload.num_kv_blocks(rank)
                self.require(above == parent.num_blocks, f"{at}: KV below a gap")
            in_children = Counter(rank for c in node.children.values() for rank in c.payload.kv)
            self.require(
                node.num_kv_children == dict(in_children), "the count of KV children is off"
            )

    def leases(self, ends: Iterable[tuple[Namespace, RadixNode, int]]) -> None:
        """Every lease ends at the end of a node of the tree, and each node counts those at and below it."""
        counts: Counter[int] = Counter()
        alive = {id(node) for node in self._nodes} | {id(root) for root in self._tree.roots()}
        for namespace, end, num_blocks in ends:
            self.require(id(end) in alive, f"a lease of {namespace} ends at a removed node")
            self.require(
                end.end_block == num_blocks, f"a lease of {num_blocks} blocks is not exact"
            )
            node: RadixNode | None = end
            while node is not None:
                counts[id(node)] += 1
                node = node.parent
        for node in [*self._nodes, *self._tree.roots()]:
            self.require(
                node.num_leases == counts[id(node)], f"leases at {node.first_block} are off"
            )
        for root in self._tree.roots():
            self.require(bool(root.children) or root.num_leases > 0, "an empty namespace stayed")

    def ownership(self, pools: list[BlockPool]) -> None:
        """Every KV block of the tree is in it once, and its pool says so."""
        for rank, pool in enumerate(pools):
            pool.check_invariants()
            block_ids = [b for node in self._nodes for b in node.payload.kv.get(Rank(rank), ())]
            self.require(
                len(block_ids) == len(set(block_ids)), f"rank {rank}: a block is held twice"
            )
            self.require(len(block_ids) == pool.num_tree, f"rank {rank}: blocks of the tree leaked")
            owned = all(pool.owner(b) is BlockOwner.TREE for b in block_ids)
            self.require(owned, f"rank {rank}: a block of the tree belongs to somebody else")

    def accounts(self, account: SizeAccount, pools: list[BlockPool]) -> None:
        """leased + unleased = stored for every part, counted anew, and the KV is what the pools gave to the tree."""
        leased = [node for node in self._nodes if node.num_leases]
        unleased = [node for node in self._nodes if not node.num_leases]
        for rank, part in enumerate(account.kv):
            counts = [
                sum(n.payload.num_kv_blocks(Rank(rank)) for n in nodes)
                for nodes in (leased, unleased)
            ]
            self.require([part.leased, part.unleased] == counts, f"rank {rank}: KV account is off")
            self.require(part.stored == pools[rank].num_tree, f"rank {rank}: KV account and pool")
        counts = [sum(len(n.payload.routes) for n in nodes) for nodes in (leased, unleased)]
        routes = account.routes
        self.require([routes.leased, routes.unleased] == counts, "the route account is off")
        counts = [sum(n.payload.score_bytes for n in nodes) for nodes in (leased, unleased)]
        scores = account.scores
        self.require([scores.leased, scores.unleased] == counts, "the score account is off")
        num_blocks = sum(len(n.payload.scores) for n in self._nodes)
        self.require(account.num_score_blocks == num_blocks, "the count of score blocks is off")

    def budgets(self, account: SizeAccount, max_route_blocks: int, max_score_bytes: int) -> None:
        self.require(account.routes.stored <= max_route_blocks, "over the route budget")
        self.require(account.scores.stored <= max_score_bytes, "over the score budget")

    def queues(self, evictor: Evictor) -> None:
        """Each queue finds every candidate, and names the one that a scan would."""
        for rank, queue in enumerate(evictor.kv_queues):
            self._queue(queue, partial(kv_eviction_stamp, rank=Rank(rank)), f"KV queue {rank}")
        self._queue(evictor.route_queue, route_eviction_stamp, "route queue")
        self._queue(evictor.score_queue, score_eviction_stamp, "score queue")

    def _queue(
        self, queue: LruQueue[RadixNode], stamp_of: Callable[[RadixNode], int | None], name: str
    ) -> None:
        candidates = [node for node in self._nodes if stamp_of(node) is not None]
        held = queue.items()
        self.require(all(node in held for node in candidates), f"{name} misses a candidate")
        oldest, scanned = queue.oldest(), oldest_by_scan(candidates, stamp_of)
        same = oldest is scanned or (
            oldest is not None and scanned is not None and stamp_of(oldest) == stamp_of(scanned)
        )
        self.require(same, f"{name} names another oldest than a scan")


def _depth(node: RadixNode) -> int:
    depth = 0
    while node.parent is not None:
        depth, node = depth + 1, node.parent
    return depth
