"""Blocks are given, evicted and taken back: what goes first, and what stays."""

import pytest

from cluster.errors import StoreError
from cluster.types import BlockId, Rank
from tests.prefix_store.builders import (
    BLOCK_SIZE,
    KV_BYTES_PER_BLOCK,
    NAMESPACE,
    RANK0,
    RANK1,
    branch,
    finish,
    insert,
    make_store,
    route_block_bytes,
    tokens,
    write,
)

B = BLOCK_SIZE


def test_with_only_leased_blocks_left_allocation_gives_none_and_changes_nothing() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=4)
    write(store, tokens(4 * B))
    before = store.stats()

    assert store.allocate(RANK0, 1) is None

    assert store.stats() == before
    assert store.num_allocatable(RANK0) == 0


def test_with_only_leased_routes_left_publishing_fails_softly() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=3)
    insert(store, tokens(3 * B))
    store.evict("kv")
    replaying = store.acquire(NAMESPACE, tokens(3 * B), 3 * B)

    written = write(store, tokens(3 * B, first=500))

    assert written.publication.outcomes == ("private",) * 3
    assert not written.publication.conflict
    assert written.lease.num_tokens == 0
    store.check_invariants()
    finish(store, written)
    store.release(replaying)
    assert write(store, tokens(3 * B, first=500)).publication.outcomes == ("added",) * 3


def test_kv_of_the_prefix_used_longest_ago_goes_first() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=6)
    old, young = tokens(3 * B), tokens(3 * B, first=500)
    insert(store, old)
    insert(store, young)
    lease = store.acquire(NAMESPACE, old, 3 * B)
    store.kv_block_ids(lease, RANK0, 3 * B)
    store.release(lease)

    assert store.allocate(RANK0, 2) is not None

    assert store.match(NAMESPACE, young).num_kv_tokens == (B,)
    assert store.match(NAMESPACE, old).num_kv_tokens == (3 * B,)


def test_use_on_one_rank_does_not_keep_the_kv_of_another() -> None:
    store = make_store(num_ranks=2, num_kv_blocks=4)
    shared, other = tokens(2 * B), tokens(2 * B, first=500)
    insert(store, shared, rank=RANK1)
    insert(store, other, rank=RANK1)
    insert(store, shared, rank=RANK0)

    assert store.allocate(RANK1, 1) is not None

    assert store.match(NAMESPACE, shared).num_kv_tokens == (2 * B, B)
    assert store.match(NAMESPACE, other).num_kv_tokens == (0, 2 * B)


def test_kv_goes_before_routes() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=4)
    insert(store, tokens(4 * B))

    block_ids = store.allocate(RANK0, 4)

    assert block_ids is not None
    match = store.match(NAMESPACE, tokens(4 * B))
    assert match.num_kv_tokens == (0,)
    assert match.num_route_tokens == 4 * B


def test_a_publish_evicts_routes_used_longest_ago_but_none_under_kv() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=4)
    insert(store, tokens(2 * B))
    insert(store, tokens(2 * B, first=500))
    assert store.allocate(RANK0, 2) is not None  # takes the KV of the first

    written = write(store, branch(0, B, first=900))

    assert written.publication.outcomes == ("added",)
    assert store.match(NAMESPACE, tokens(2 * B)).num_route_tokens == B
    assert store.match(NAMESPACE, tokens(2 * B, first=500)).num_kv_tokens == (B,)
    assert store.match(NAMESPACE, tokens(2 * B, first=500)).num_route_tokens == 2 * B


def test_evicting_kv_by_command_keeps_routes_and_leased_nodes() -> None:
    store = make_store()
    insert(store, tokens(4 * B))
    insert(store, tokens(2 * B, first=500))
    lease = store.acquire(NAMESPACE, tokens(4 * B), 2 * B)

    eviction = store.evict("kv")

    assert (eviction.part, eviction.nodes, eviction.kept_leased) == ("kv", 2, 1)
    assert eviction.num_bytes == 4 * KV_BYTES_PER_BLOCK
    match = store.match(NAMESPACE, tokens(4 * B))
    assert (match.num_kv_tokens, match.num_route_tokens) == ((2 * B, 0), 4 * B)
    store.release(lease)
    store.check_invariants()


@pytest.mark.parametrize("part", ["routes", "all"])
def test_evicting_routes_by_command_takes_the_kv_along(part: str) -> None:
    store = make_store()
    insert(store, tokens(4 * B), rank=RANK0)
    insert(store, tokens(3 * B), rank=RANK1)

    eviction = store.evict("routes" if part == "routes" else "all")

    assert eviction.num_bytes == 7 * KV_BYTES_PER_BLOCK + 4 * route_block_bytes()
    assert store.match(NAMESPACE, tokens(4 * B)).num_route_tokens == 0
    assert store.stats().kv_blocks_free == (16, 16)
    assert store.stats().num_nodes == 0


def test_blocks_that_are_free_or_the_trees_cannot_be_freed() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=4)
    written = write(store, tokens(B))
    owned = store.allocate(RANK0, 1)
    assert owned is not None
    before = store.stats()

    with pytest.raises(StoreError, match="is the tree's"):
        store.free(RANK0, [*owned, *written.block_ids])
    with pytest.raises(StoreError, match="is free"):
        store.free(RANK0, [*owned, BlockId(3)])
    with pytest.raises(StoreError, match="twice"):
        store.free(RANK0, [*owned, *owned])
    with pytest.raises(StoreError, match="does not exist"):
        store.free(RANK0, [BlockId(4)])

    assert store.stats() == before


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(StoreError, match="rank 2"):
        make_store(num_ranks=2).allocate(Rank(2), 1)
