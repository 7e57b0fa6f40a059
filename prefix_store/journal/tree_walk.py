"""A walk over the tree that goes on while the tree changes, a node at a time."""

from prefix_store.radix_tree import RadixNode, RadixTree, path_from_root


class TreeWalk:
    """Meets every block that was in the tree when the walk began and still is when its turn comes.

    What is published meanwhile may be met or not. A node that is split while it waits for its turn keeps the lower
    blocks, so the upper ones are found above it, from the block on with which it began:

        waits as   node[2, 9)          meets   upper[2, 5) ── node[5, 9)

    Its children are still its own; those of the upper part are newer than the walk.
    """

    def __init__(self, tree: RadixTree) -> None:
        children = [child for root in tree.roots() for child in root.children.values()]
        self._waiting = [(child, child.first_block) for child in children]

    def next_path(self) -> list[RadixNode]:
        """The next node, below the parts that were split off it; nodes without blocks have left the tree. Empty when
        all have been met. Valid until the tree changes."""
        while self._waiting:
            node, first_block = self._waiting.pop()
            self._waiting += [(child, child.first_block) for child in node.children.values()]
            path = path_from_root(node, first_block)
            if any(part.num_blocks for part in path):
                return path
        return []
