"""Routes under a lease come out as they were published."""

import numpy as np
import pytest

from cluster.errors import StoreError
from cluster.routes import RouteShape
from tests.prefix_store.builders import (
    BLOCK_SIZE,
    NAMESPACE,
    RANK0,
    RANK1,
    branch,
    finish,
    gate,
    gates,
    insert,
    make_store,
    tokens,
    write,
)

B = BLOCK_SIZE


@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 4 * B), (1, 2), (B - 1, 2 * B + 1), (B, B)])
def test_routes_of_any_range_are_those_published(start: int, end: int) -> None:
    store = make_store()
    insert(store, tokens(4 * B))
    insert(store, branch(2 * B, B))  # splits the node
    lease = store.acquire(NAMESPACE, tokens(4 * B), 4 * B)

    got = store.routes(lease, start, end)

    expected = gates(tokens(4 * B), 0, 4).slice(start, end)
    assert np.array_equal(got.topk_ids, expected.topk_ids)
    assert np.array_equal(got.topk_weights, expected.topk_weights)


def test_routes_outlive_their_eviction_and_nobody_can_write_them() -> None:
    store = make_store()
    sequence = tokens(B)
    published = gates(sequence, 0, 1)
    finish(store, write(store, sequence, routes=published))
    published.topk_ids[:] = 0
    lease = store.acquire(NAMESPACE, sequence, B)
    routes = store.routes(lease, 0, B)
    store.release(lease)

    store.evict("all")

    assert np.array_equal(routes.topk_ids, gate(sequence).topk_ids)
    for array in (routes.topk_ids, routes.topk_weights):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)


def test_routes_beyond_the_lease_are_refused() -> None:
    store = make_store()
    insert(store, tokens(2 * B))
    lease = store.acquire(NAMESPACE, tokens(2 * B), B)

    with pytest.raises(StoreError, match="under a lease of 4 tokens"):
        store.routes(lease, 0, B + 1)


def test_kv_that_the_rank_does_not_hold_is_refused() -> None:
    store = make_store()
    insert(store, tokens(2 * B), rank=RANK0)
    lease = store.acquire(NAMESPACE, tokens(2 * B), 2 * B)

    with pytest.raises(StoreError, match="rank 1"):
        store.kv_block_ids(lease, RANK1, B)


def test_ids_above_255_survive_for_models_with_more_than_256_experts() -> None:
    shape = RouteShape(num_moe_layers=3, num_experts_per_tok=2, num_experts=384)
    store = make_store(shape=shape)
    sequence = tokens(64 * B // 8)
    finish(store, write(store, sequence, shape=shape))
    lease = store.acquire(NAMESPACE, sequence, len(sequence))

    routes = store.routes(lease, 0, len(sequence))

    expected = gates(sequence, 0, len(sequence) // B, shape=shape)
    assert routes.topk_ids.dtype == np.uint16
    assert routes.topk_ids.max() > 255
    assert np.array_equal(routes.topk_ids, expected.topk_ids)
