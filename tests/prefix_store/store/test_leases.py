"""Leases keep what they cover, however the tree changes around it."""

import pytest

from cluster.errors import StoreError
from tests.prefix_store.builders import (
    BLOCK_SIZE,
    NAMESPACE,
    RANK0,
    branch,
    finish,
    gates,
    insert,
    make_store,
    tokens,
    write,
)

B = BLOCK_SIZE


def test_a_lease_in_the_middle_of_a_node_protects_exactly_its_tokens() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=6)
    insert(store, tokens(6 * B))
    lease = store.acquire(NAMESPACE, tokens(6 * B), 2 * B)

    assert store.stats().kv_blocks_leased == 2
    assert store.num_allocatable(RANK0) == 4
    assert store.allocate(RANK0, 5) is None
    block_ids = store.allocate(RANK0, 4)

    assert block_ids is not None
    assert len(block_ids) == 4
    assert store.match(NAMESPACE, tokens(6 * B)).num_kv_tokens == (2 * B,)
    assert set(store.kv_block_ids(lease, RANK0, 2 * B)).isdisjoint(block_ids)
    store.check_invariants()


def test_a_matched_leaf_under_lease_survives_eviction_of_everything_else() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=8)
    insert(store, tokens(4 * B))
    insert(store, tokens(4 * B, first=500))
    lease = store.acquire(NAMESPACE, tokens(4 * B), 4 * B)
    held = store.kv_block_ids(lease, RANK0, 4 * B)

    block_ids = store.allocate(RANK0, 4)

    assert block_ids is not None
    assert set(block_ids).isdisjoint(held)
    assert store.match(NAMESPACE, tokens(4 * B, first=500)).num_kv_tokens == (0,)
    assert store.match(NAMESPACE, tokens(4 * B)).num_kv_tokens == (4 * B,)


def test_splitting_a_leased_node_keeps_both_halves_leased() -> None:
    store = make_store()
    insert(store, tokens(4 * B))
    whole = store.acquire(NAMESPACE, tokens(4 * B), 4 * B)
    half = store.acquire(NAMESPACE, branch(2 * B, 2 * B), 2 * B)

    assert store.stats().num_nodes == 2
    assert store.stats().kv_blocks_leased == 4
    store.release(half)
    assert store.stats().kv_blocks_leased == 4
    store.check_invariants()
    store.release(whole)

    assert store.stats().kv_blocks_leased == 0
    assert (whole.num_tokens, half.num_tokens) == (4 * B, 2 * B)
    store.check_invariants()


def test_growing_one_lease_does_not_grow_another_on_the_same_node() -> None:
    store = make_store()
    written = write(store, tokens(2 * B))
    other = store.acquire(NAMESPACE, tokens(2 * B), 2 * B)

    block_ids = store.allocate(RANK0, 1)
    assert block_ids is not None
    store.publish(written.lease, RANK0, tokens(3 * B), 2, block_ids, gates(tokens(3 * B), 2, 3))
    finish(store, written)

    assert other.num_tokens == 2 * B
    assert store.stats().kv_blocks_leased == 2
    store.check_invariants()


def test_a_sole_holder_grows_its_node_in_place() -> None:
    store = make_store()
    sequence = tokens(6 * B)
    written = write(store, sequence[: 2 * B])

    for block in range(2, 6):
        block_ids = store.allocate(RANK0, 1)
        assert block_ids is not None
        routes = gates(sequence, block, block + 1)
        store.publish(written.lease, RANK0, sequence[: (block + 1) * B], block, block_ids, routes)

    assert written.lease.num_tokens == 6 * B
    assert store.stats().num_nodes == 1


def test_a_lease_is_released_once() -> None:
    store = make_store()
    lease = store.acquire(NAMESPACE, tokens(B), 0)
    store.release(lease)

    with pytest.raises(StoreError, match="was released"):
        store.release(lease)
    with pytest.raises(StoreError, match="was released"):
        store.routes(lease, 0, 0)


@pytest.mark.parametrize("num_tokens", [1, B - 1, 3 * B, -B])
def test_a_lease_covers_whole_blocks_that_exist(num_tokens: int) -> None:
    store = make_store()
    insert(store, tokens(2 * B))

    with pytest.raises(StoreError, match="lease of"):
        store.acquire(NAMESPACE, tokens(3 * B), num_tokens)
    store.check_invariants()
