"""Path-compressed radix tree over whole blocks of token ids, one root per namespace. Keys, shape and lease counts only.

An edge holds the tokens themselves and they are compared by bytes, so two prompts can never be mixed up by a hash.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.types import Namespace, Rank
from prefix_store.payload import NodePayload


class BlockKeys:
    """The full blocks of a token sequence as bytes (int32, little-endian); the tokens after them do not count."""

    def __init__(self, token_ids: npt.NDArray[np.int32], block_size: int) -> None:
        self._block_bytes = 4 * block_size
        self._num_blocks = len(token_ids) // block_size
        self._data = token_ids.astype("<i4", copy=False).tobytes()

    def __len__(self) -> int:
        return self._num_blocks

    def __getitem__(self, block: int) -> bytes:
        return self._data[block * self._block_bytes : (block + 1) * self._block_bytes]


@dataclass(eq=False)
class RadixNode:
    """A run of blocks [first_block, end_block) of every sequence that goes through it. A root holds no blocks."""

    namespace: Namespace
    parent: "RadixNode | None"
    first_block: int
    keys: list[bytes]
    payload: NodePayload
    children: dict[bytes, "RadixNode"] = field(default_factory=dict)
    num_leases: int = 0
    """Leases that end at this node or below it."""
    num_kv_children: dict[Rank, int] = field(default_factory=dict)
    """Children that hold KV, per rank; a rank without any has no entry."""

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.keys)


class MatchedNode(NamedTuple):
    node: RadixNode
    num_blocks: int
    """How many of the node's blocks match; fewer than all only at the end of a path."""


class RadixTree:
    """Owner of nodes and their lease counts. A node is valid until removed; a split keeps it as the lower half."""

    def __init__(self) -> None:
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
            self._roots[namespace] = RadixNode(namespace, None, 0, [], NodePayload(0))
        return self._roots[namespace]

    def descend(self, start: RadixNode, keys: BlockKeys, end_block: int) -> list[MatchedNode]:
        """The longest path below the end of `start` that equals keys [start.end_block, end_block). Does not mutate."""
        path: list[MatchedNode] = []
        block, node = start.end_block, start
        while block < end_block:
            child = node.children.get(keys[block])
            if child is None:
                break
            matched = _num_equal(child, keys, end_block)
            path.append(MatchedNode(child, matched))
            if matched < len(child.keys):
                break
            block, node = child.end_block, child
        return path

    def split(self, node: RadixNode, num_blocks: int) -> RadixNode:
        """Cuts the first blocks off into a node of their own above `node`, and returns it.

        before   parent ── node[0, n)                     after   parent ── upper[0, k) ── node[k, n)

        A lease ends at the end of a node, so every lease on `node` still ends where it did, and counts for both.
        """
        parent = node.parent
        assert parent is not None
        assert 0 < num_blocks < len(node.keys)
        upper = RadixNode(
            node.namespace,
            parent,
            node.first_block,
            node.keys[:num_blocks],
            node.payload.take_head(num_blocks),
            num_leases=node.num_leases,
        )
        del node.keys[:num_blocks]
        node.parent, node.first_block = upper, upper.end_block
        parent.children[upper.keys[0]] = upper
        upper.children[node.keys[0]] = node
        upper.num_kv_children = dict.fromkeys(node.payload.kv, 1)
        self.num_nodes += 1
        return upper

    def add_child(self, parent: RadixNode, key: bytes, payload: NodePayload) -> RadixNode:
        """A node of one block; mutates."""
        assert key not in parent.children
        child = RadixNode(parent.namespace, parent, parent.end_block, [key], payload)
        parent.children[key] = child
        self.num_nodes += 1
        return child

    def remove_tail(self, leaf: RadixNode, num_blocks: int) -> None:
        """Takes the last blocks off a leaf without leases, and the leaf out of the tree when none are left."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        assert leaf.num_leases == 0
        first_key = leaf.keys[0]
        del leaf.keys[len(leaf.keys) - num_blocks :]
        if not leaf.keys:
            del parent.children[first_key]
            self.num_nodes -= 1

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

    def _top_down(self) -> Iterator[RadixNode]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def path_from_root(node: RadixNode, first_block: int = 0) -> list[RadixNode]:
    """The nodes that hold blocks at or after `first_block`, down to `node`, in token order. Does not mutate."""
    path = list(takewhile(lambda part: part.end_block > first_block, _upwards(node, None)))
    path.reverse()
    return path


def _upwards(node: RadixNode, above: RadixNode | None) -> Iterator[RadixNode]:
    part: RadixNode | None = node
    while part is not None and part is not above:
        yield part
        part = part.parent


def _num_equal(node: RadixNode, keys: BlockKeys, end_block: int) -> int:
    """Leading blocks of the node that equal the keys, of which there are `end_block`. The first one is known to."""
    limit = min(node.end_block, end_block) - node.first_block
    for offset in range(1, limit):
        if node.keys[offset] != keys[node.first_block + offset]:
            return offset
    return limit
