"""What the store knows of a lease beyond what its holder sees."""

from dataclasses import dataclass, field

from cluster.types import Namespace, Rank
from prefix_store.radix_tree import BlockKeys, RadixNode


@dataclass(eq=False)
class LeasedPath:
    """The path that a lease protects: whole nodes from the root to `end_node`, whose end is the lease's end."""

    end_node: RadixNode
    keys: BlockKeys
    """Of its holder's sequence, at least as far as the lease goes."""
    ranks: set[Rank] = field(default_factory=set)
    """Ranks whose KV the holder reads or writes: what its release marks as used."""
    conflicted: bool = False
    """A block of the holder has other routes than the tree's: nothing after it may be published."""

    @property
    def namespace(self) -> Namespace:
        return self.end_node.namespace

    @property
    def end_block(self) -> int:
        return self.end_node.end_block
