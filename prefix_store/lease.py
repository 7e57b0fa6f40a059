"""The lease: what a request holds while it relies on a path of the tree."""

from cluster.types import Namespace, Rank
from prefix_store.radix_tree import RadixNode


class Lease:
    """Protects the first `num_tokens` of a path, exactly: it ends at the end of a node.

    Made, grown and ended by the store, which alone reads or writes the attributes below `num_tokens`.
    """

    def __init__(self, end_node: RadixNode, block_size: int) -> None:
        self._block_size = block_size
        self.end_node = end_node
        self.ranks: set[Rank] = set()
        """Ranks whose KV the holder reads or writes: what its release marks as used."""
        self.conflicted = False
        """A block of the holder has other routes than the tree's: nothing after it may be published."""

    @property
    def namespace(self) -> Namespace:
        return self.end_node.namespace

    @property
    def num_tokens(self) -> int:
        return self.end_node.end_block * self._block_size
