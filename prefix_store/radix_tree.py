"""Path-compressed radix tree over whole blocks of token ids, one root per namespace. Keys, shape and lease counts only.

An edge holds the tokens themselves and they are compared by bytes, so two prompts can never be mixed up by a hash.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.types import Namespace, Rank
from prefix_store.packed_routes import PackedRoutes
from prefix_store.payload import NodePayload

_INT32_ON_EDGES = np.dtype("<i4")


class BlockKeys:
    """The full blocks of a token sequence as bytes (int32, little-endian); the tokens after them do not count."""

    def __init__(self, token_ids: npt.NDArray[np.int32], block_size: int) -> None:
        self.block_bytes = 4 * block_size
        self.data = token_ids.astype(_INT32_ON_EDGES, copy=False).tobytes()
        self._num_blocks = len(token_ids) // block_size

    def __len__(self) -> int:
        return self._num_blocks

    def run(self, first_block: int, end_block: int) -> bytes:
        return self.data[first_block * self.block_bytes : end_block * self.block_bytes]


@dataclass(eq=False, slots=True)
class RadixNode:
    """A run of blocks [first_block, end_block) of every sequence that goes through it. A root holds no blocks.

    Parents find a child by the bytes of its first block.
    """

    namespace: Namespace
    parent: "RadixNode | None"
    first_block: int
    end_block: int
    edge: bytearray
    """The token ids of the blocks, as in BlockKeys."""
    payload: NodePayload
    children: dict[bytes, "RadixNode"] = field(default_factory=dict)
    num_leases: int = 0
    """Leases that end at this node or below it."""
    num_kv_children: dict[Rank, int] = field(default_factory=dict)
    """Children that hold KV, per rank; a rank without any has no entry."""

    @property
    def num_blocks(self) -> int:
        return self.end_block - self.first_block

    def routes_between(self, first_block: int, end_block: int) -> PackedRoutes:
        """Of those of the blocks, numbered from the root, that are this node's. Does not mutate."""
        start, end = first_block - self.first_block, end_block - self.first_block
        return self.payload.routes.part(max(start, 0), max(end, 0))


class TreePath(NamedTuple):
    """Nodes that follow each other and hold a sequence's blocks; all of each, but for the last perhaps."""

    nodes: list[RadixNode]
    end_block: int
    """Where the last node's blocks stop being the sequence's."""


class RadixTree:
    """Owner of nodes and their lease counts. A node is valid until removed; a split keeps it as the lower half."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = 4 * block_size
        self._roots: dict[Namespace, RadixNode] = {}
        self.num_nodes = 0
        """Nodes with blocks: roots are not counted."""

    def roots(self) -> list[RadixNode]:
        return list(self._roots.values())

    def root(self, namespace: Namespace) -> RadixNode | None:
        return self._roots.get(namespace)

    def ensure_root(self, namespace: Namespace) -> RadixNode:
        """The root, made if it is missing; mutates."""
        if namespace not in self._roots:
            self._roots[namespace] = RadixNode(namespace, None, 0, 0, bytearray(), NodePayload(0))
        return self._roots[namespace]

    def descend(self, start: RadixNode, keys: BlockKeys, end_block: int) -> TreePath:
        """The longest path below the end of `start` that equals keys [start.end_block, end_block). Does not mutate."""
        nodes: list[RadixNode] = []
        data, size = keys.data, keys.block_bytes
        at, end, node = start.end_block * size, end_block * size, start
        while at < end:
            child = node.children.get(data[at : at + size])
            if child is None:
                break
            nodes.append(child)
            edge = child.edge
            if at + len(edge) > end or not data.startswith(edge, at):
                at += _num_equal_blocks(edge, data[at:end], size) * size
                break
            at, node = at + len(edge), child
        return TreePath(nodes, at // size)

    def split(self, node: RadixNode, num_blocks: int) -> RadixNode:
        """Cuts the first blocks off into a node of their own above `node`, and returns it.

        before   parent ── node[0, n)                     after   parent ── upper[0, k) ── node[k, n)

        A lease ends at the end of a node, so every lease on `node` still ends where it did, and counts for both.
        """
        parent = node.parent
        assert parent is not None
        assert 0 < num_blocks < node.num_blocks
        cut = num_blocks * self._block_bytes
        upper = RadixNode(
            node.namespace,
            parent,
            node.first_block,
            node.first_block + num_blocks,
            node.edge[:cut],
            node.payload.take_head(num_blocks),
            num_leases=node.num_leases,
        )
        node.parent, node.first_block, node.edge = upper, upper.end_block, node.edge[cut:]
        parent.children[self._first_key(upper.edge)] = upper
        upper.children[self._first_key(node.edge)] = node
        upper.num_kv_children = dict.fromkeys(node.payload.kv, 1)
        self.num_nodes += 1
        return upper

    def add_child(self, parent: RadixNode, edge: bytes, payload: NodePayload) -> RadixNode:
        """A node of at least one block; mutates."""
        first_block = parent.end_block
        end_block = first_block + len(edge) // self._block_bytes
        child = RadixNode(
            parent.namespace, parent, first_block, end_block, bytearray(edge), payload
        )
        key = self._first_key(edge)
        assert key not in parent.children
        parent.children[key] = child
        self.num_nodes += 1
        return child

    def extend(self, leaf: RadixNode, edge: bytes, routes: PackedRoutes) -> None:
        """Further blocks at the end of a leaf; mutates."""
        assert not leaf.children
        leaf.edge += edge
        leaf.end_block += len(routes)
        leaf.payload.add_blocks(routes)

    def remove_tail(self, leaf: RadixNode, num_blocks: int) -> None:
        """Takes the last blocks, which have no KV, off a leaf without leases, and the leaf out of the tree when none
        are left."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        assert leaf.num_leases == 0
        if num_blocks == leaf.num_blocks:
            del parent.children[self._first_key(leaf.edge)]
            self.num_nodes -= 1
        leaf.payload.drop_tail(num_blocks)
        del leaf.edge[len(leaf.edge) - num_blocks * self._block_bytes :]
        leaf.end_block -= num_blocks

    def drop_if_empty(self, namespace: Namespace) -> None:
        """A namespace without nodes and leases goes."""
        root = self._roots[namespace]
        if not root.children and root.num_leases == 0:
            del self._roots[namespace]

    def acquire(self, node: RadixNode, above: RadixNode | None) -> list[RadixNode]:
        """Counts a lease on `node` and its ancestors below `above` (None: all). Returns the newly leased."""
        newly_leased = []
        for part in _upwards(node, above):
            part.num_leases += 1
            if part.num_leases == 1:
                newly_leased.append(part)
        return newly_leased

    def release(self, node: RadixNode) -> list[RadixNode]:
        """Takes one lease off `node` and all its ancestors. Returns those without any lease now, lowest first."""
        unleased = []
        for part in _upwards(node, None):
            part.num_leases -= 1
            if part.num_leases == 0:
                unleased.append(part)
        return unleased

    def nodes_bottom_up(self) -> list[RadixNode]:
        """All nodes with blocks, every node after its children. A list: the tree may change while it is used."""
        order = list(self._top_down())
        order.reverse()
        return order

    def _first_key(self, edge: bytes | bytearray) -> bytes:
        return bytes(edge[: self._block_bytes])

    def _top_down(self) -> Iterator[RadixNode]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def path_from_root(node: RadixNode, first_block: int = 0) -> list[RadixNode]:
    """The nodes that hold blocks at or after `first_block`, down to `node`, in token order. Does not mutate."""
    path: list[RadixNode] = []
    part: RadixNode | None = node
    while part is not None and part.end_block > first_block:
        path.append(part)
        part = part.parent
    path.reverse()
    return path


def _upwards(node: RadixNode, above: RadixNode | None) -> Iterator[RadixNode]:
    part: RadixNode | None = node
    while part is not None and part is not above:
        yield part
        part = part.parent


def _num_equal_blocks(edge: bytearray, data: bytes, block_bytes: int) -> int:
    """Leading blocks of an edge that equal the data, by halving. The first one is known to."""
    low, high = 1, min(len(edge), len(data)) // block_bytes
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * block_bytes, middle * block_bytes
        if edge[start:end] == data[start:end]:
            low = middle
        else:
            high = middle - 1
    return low
