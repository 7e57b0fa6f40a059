"""The route budget and the numbers in the statistics."""

import pytest

from cluster.errors import ConfigError
from prefix_store.store import PrefixStore
from tests.prefix_store.builders import (
    BLOCK_SIZE,
    KV_BYTES_PER_BLOCK,
    RANK0,
    SHAPE,
    finish,
    insert,
    make_store,
    route_block_bytes,
    tokens,
    write,
)

B = BLOCK_SIZE


def test_a_route_budget_below_the_routes_of_all_kv_is_refused_with_both_numbers() -> None:
    needed = 2 * 16 * route_block_bytes()

    with pytest.raises(
        ConfigError, match=rf"{needed - 1} bytes .* {needed} bytes .*--route-memory"
    ):
        PrefixStore(
            num_ranks=2,
            num_kv_blocks=16,
            block_size=B,
            route_shape=SHAPE,
            route_budget_bytes=needed - 1,
            score_budget_bytes=0,
            kv_bytes_per_block=KV_BYTES_PER_BLOCK,
        )


def test_stats_count_free_used_leased_and_evicted() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=4)
    insert(store, tokens(3 * B))
    written = write(store, tokens(2 * B))
    assert store.allocate(RANK0, 2) is not None

    stats = store.stats()

    assert (stats.kv_blocks_free, stats.kv_blocks_used) == ((0,), (4,))
    assert stats.kv_blocks_leased == 2
    assert stats.kv_bytes == 2 * KV_BYTES_PER_BLOCK
    assert stats.route_bytes == 3 * route_block_bytes()
    assert (stats.kv_blocks_evicted, stats.route_blocks_evicted) == (1, 0)
    finish(store, written)
