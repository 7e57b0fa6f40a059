"""What of a prompt is found, and for whom."""

import numpy as np
import pytest

from cluster.errors import StoreError
from cluster.types import Namespace
from tests.prefix_store.builders import (
    BLOCK_SIZE,
    KV_BYTES_PER_BLOCK,
    NAMESPACE,
    branch,
    insert,
    make_store,
    tokens,
)

B = BLOCK_SIZE


@pytest.mark.parametrize(
    ("length", "num_blocks"), [(0, 0), (B - 1, 0), (B, 1), (B + 1, 1), (2 * B, 2), (2 * B + 1, 2)]
)
def test_only_full_blocks_are_found(length: int, num_blocks: int) -> None:
    store = make_store()
    insert(store, tokens(length))

    match = store.match(NAMESPACE, tokens(length))

    assert match.num_route_tokens == num_blocks * B
    assert match.num_kv_tokens == (num_blocks * B, 0)
    store.check_invariants()


@pytest.mark.parametrize("extra", [0, 1, B - 1])
@pytest.mark.parametrize("shared_blocks", [0, 1, 2, 3])
def test_prompts_share_the_full_blocks_that_are_equal(shared_blocks: int, extra: int) -> None:
    store = make_store()
    insert(store, tokens(4 * B))
    other = branch(shared_blocks * B + extra, 3 * B)

    match = store.match(NAMESPACE, other)
    insert(store, other)

    assert match.num_kv_tokens == (shared_blocks * B, 0)
    num_blocks = len(other) // B
    assert store.match(NAMESPACE, other).num_kv_tokens == (num_blocks * B, 0)
    assert store.match(NAMESPACE, tokens(4 * B)).num_kv_tokens == (4 * B, 0)
    assert store.stats().kv_bytes == (4 + num_blocks - shared_blocks) * KV_BYTES_PER_BLOCK
    store.check_invariants()


def test_a_match_changes_nothing() -> None:
    store = make_store()
    insert(store, tokens(4 * B))
    before = store.stats()

    store.match(NAMESPACE, branch(B, 3 * B))
    store.match(Namespace("unknown"), tokens(4 * B))

    assert store.stats() == before


def test_namespaces_never_share_blocks() -> None:
    store = make_store()
    insert(store, tokens(2 * B))

    other = Namespace("tenant-b")

    assert store.match(other, tokens(2 * B)).num_route_tokens == 0
    insert(store, tokens(2 * B), namespace=other)
    assert store.match(other, tokens(2 * B)).num_route_tokens == 2 * B
    assert store.stats().kv_bytes == 4 * KV_BYTES_PER_BLOCK


def test_a_namespace_goes_with_its_last_block() -> None:
    store = make_store()
    insert(store, tokens(2 * B))
    lease = store.acquire(Namespace("empty"), tokens(B), 0)

    store.evict("all")
    store.release(lease)

    store.check_invariants()  # refuses a namespace without nodes and leases
    assert store.stats().num_nodes == 0


@pytest.mark.parametrize("equal_blocks", [1, 2, 3, 5, 8, 13])
def test_a_match_ends_inside_an_edge_where_the_tokens_begin_to_differ(equal_blocks: int) -> None:
    store = make_store(num_ranks=1)
    insert(store, tokens(13 * B))
    prompt = branch(equal_blocks * B + B - 1, 14 * B)

    match = store.match(NAMESPACE, prompt)

    assert match.num_route_tokens == equal_blocks * B
    assert match.num_kv_tokens == (equal_blocks * B,)


def test_token_ids_of_another_dtype_are_refused() -> None:
    with pytest.raises(StoreError, match="int32"):
        make_store().match(NAMESPACE, np.arange(8))  # type: ignore[arg-type]  # the point
