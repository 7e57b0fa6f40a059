"""Kept blocks into an empty tree: routes and scores, without KV and without leases."""

from dataclasses import dataclass

from prefix_store.evictor import Evictor
from prefix_store.journal.loading import KeptBlocks, LoadedRun
from prefix_store.packed_routes import PackedRoutes
from prefix_store.payload import NodePayload
from prefix_store.radix_tree import RadixNode, RadixTree
from prefix_store.size_account import SizeAccount


class TreeRestorer:
    """Puts runs of blocks where they were. Knows of every block the node that it was put into: after a split that is
    the lower part, and blocks of the upper ones are found above it."""

    def __init__(self, tree: RadixTree, kept: KeptBlocks) -> None:
        self._tree = tree
        self._kept = kept
        num_blocks = len(kept.index.parents)
        self._nodes: list[RadixNode | None] = [None] * num_blocks
        self._ends = [0] * num_blocks
        """Where the block ends, in blocks from its sequence's start."""

    def run(self) -> None:
        """All of it. Raises OSError."""
        for run in self._kept.route_runs():
            self._put(run)
        for block, row in self._kept.score_rows():
            node = self._node_of(block)
            node.payload.restore_scores(self._ends[block] - 1 - node.first_block, row)

    def _put(self, run: LoadedRun) -> None:
        above = self._above(run)
        node = self._append(above, run.edge, run.routes, run.stamp)
        first = node.end_block - len(run.routes)
        for number in range(len(run.routes)):
            self._nodes[run.first + number] = node
            self._ends[run.first + number] = first + number + 1

    def _above(self, run: LoadedRun) -> RadixNode:
        """The node at whose end the run begins, split off where it does not end there."""
        if run.parent is None:
            assert run.namespace is not None
            return self._tree.ensure_root(run.namespace)
        node, end = self._node_of(run.parent), self._ends[run.parent]
        if end < node.end_block:
            return self._tree.split(node, end - node.first_block)
        return node

    def _append(self, above: RadixNode, edge: bytes, routes: PackedRoutes, stamp: int) -> RadixNode:
        if above.parent is None or above.children:
            return self._tree.add_child(above, edge, NodePayload(stamp, routes))
        self._tree.extend(above, edge, routes)
        return above

    def _node_of(self, block: int) -> RadixNode:
        node, end = self._nodes[block], self._ends[block]
        assert node is not None
        while node.first_block >= end:
            assert node.parent is not None
            node = node.parent
        return node


@dataclass(frozen=True)
class RestoredTree:
    """An empty tree to be filled, and who must know of what is in it."""

    tree: RadixTree
    account: SizeAccount
    evictor: Evictor

    def fill(self, kept: KeptBlocks) -> None:
        """Raises OSError."""
        TreeRestorer(self.tree, kept).run()
        nodes = self.tree.nodes_bottom_up()
        self.account.routes.unleased += sum(node.num_blocks for node in nodes)
        self.account.scores.unleased += sum(node.payload.score_bytes for node in nodes)
        self.account.num_score_blocks += sum(len(node.payload.scores) for node in nodes)
        for node in nodes:
            self.evictor.offer(node)
