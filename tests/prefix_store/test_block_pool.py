"""The block pool's states."""

from cluster.types import Rank
from prefix_store.block_pool import BlockOwner, BlockPool


def test_free_blocks_are_handed_out_first_in_first_out() -> None:
    pool = BlockPool(Rank(0), 4)
    first = pool.allocate(2)
    pool.free(list(reversed(first)))

    assert pool.allocate(4) == [2, 3, 1, 0]


def test_a_block_goes_from_free_to_request_to_tree_and_back() -> None:
    pool = BlockPool(Rank(0), 1)
    (block_id,) = pool.allocate(1)
    owners = [pool.owner(block_id)]
    pool.give_to_tree([block_id])
    owners.append(pool.owner(block_id))
    assert (pool.num_free, pool.num_tree) == (0, 1)
    pool.reclaim([block_id])
    owners.append(pool.owner(block_id))

    assert owners == [BlockOwner.REQUEST, BlockOwner.TREE, BlockOwner.FREE]
    assert (pool.num_free, pool.num_tree) == (1, 0)
    pool.check_invariants()
