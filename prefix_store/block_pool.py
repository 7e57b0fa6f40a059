"""The only allocator of one rank's KV block ids. No tensors, and no opinion on which blocks the tree should give up."""

from collections import deque
from enum import IntEnum

from cluster.errors import StoreError
from cluster.types import BlockId, Rank


class BlockOwner(IntEnum):
    FREE = 0
    REQUEST = 1
    TREE = 2


_STATE = {BlockOwner.FREE: "free", BlockOwner.TREE: "the tree's"}


class BlockPool:
    """Owner of the state of every block of a rank; each change is O(1) per block. Free blocks are handed out first-in
    first-out, so that a block's old content stays readable as long as possible for whoever debugs it.

        free ──allocate──► request ──give_to_tree──► tree
          ▲──────free────────┘                        │
          └───────────────────reclaim─────────────────┘
    """

    def __init__(self, rank: Rank, num_blocks: int) -> None:
        self._rank = rank
        self._free = deque(BlockId(block) for block in range(num_blocks))
        self._owners = bytearray([BlockOwner.FREE]) * num_blocks
        """A BlockOwner per block."""
        self._num_tree = 0

    @property
    def num_blocks(self) -> int:
        return len(self._owners)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_tree(self) -> int:
        return self._num_tree

    def owner(self, block_id: BlockId) -> BlockOwner:
        return BlockOwner(self._owners[block_id])

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Free blocks for a request; the caller has made sure that there are enough."""
        assert num_blocks <= len(self._free)
        block_ids = [self._free.popleft() for _ in range(num_blocks)]
        self._set_owner(block_ids, BlockOwner.REQUEST)
        return block_ids

    def require_request_owned(self, block_ids: list[BlockId]) -> None:
        """Raises StoreError unless these are different blocks that requests own. Does not mutate."""
        if len(set(block_ids)) != len(block_ids):
            raise StoreError(f"rank {self._rank}: a block id is named twice in {block_ids}")
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise StoreError(
                f"rank {self._rank}: one of the blocks {block_ids} does not exist, ids go from 0 to "
                f"{self.num_blocks - 1}"
            )
        if self._all_owned_by(block_ids, BlockOwner.REQUEST):
            return
        wrong = next(b for b in block_ids if self._owners[b] != BlockOwner.REQUEST)
        raise StoreError(
            f"rank {self._rank}: block {wrong} is {_STATE[self.owner(wrong)]}; only blocks that were "
            "allocated and not published since can be freed or published"
        )

    def free(self, block_ids: list[BlockId]) -> None:
        """Back from a request. Raises StoreError, and changes nothing, if one is not request-owned."""
        self.require_request_owned(block_ids)
        self._to_free(block_ids)

    def give_to_tree(self, block_ids: list[BlockId]) -> None:
        assert self._all_owned_by(block_ids, BlockOwner.REQUEST)
        self._set_owner(block_ids, BlockOwner.TREE)
        self._num_tree += len(block_ids)

    def reclaim(self, block_ids: list[BlockId]) -> None:
        """Back from the tree."""
        assert self._all_owned_by(block_ids, BlockOwner.TREE)
        self._num_tree -= len(block_ids)
        self._to_free(block_ids)

    def _to_free(self, block_ids: list[BlockId]) -> None:
        self._set_owner(block_ids, BlockOwner.FREE)
        self._free.extend(block_ids)

    def _set_owner(self, block_ids: list[BlockId], owner: BlockOwner) -> None:
        owners, value = self._owners, int(owner)
        for block_id in block_ids:
            owners[block_id] = value

    def _all_owned_by(self, block_ids: list[BlockId], owner: BlockOwner) -> bool:
        return set(map(self._owners.__getitem__, block_ids)) <= {owner}

    def check_invariants(self) -> None:
        """Raises AssertionError if the free list and the states disagree."""
        free = {block for block, owner in enumerate(self._owners) if owner == BlockOwner.FREE}
        if free != set(self._free) or len(free) != len(self._free):
            raise AssertionError(f"rank {self._rank}: free list {list(self._free)}, states {free}")
        num_tree = sum(owner == BlockOwner.TREE for owner in self._owners)
        if num_tree != self._num_tree:
            raise AssertionError(
                f"rank {self._rank}: {self._num_tree} tree blocks, {num_tree} marked"
            )
