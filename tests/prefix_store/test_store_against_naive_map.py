"""The store against a dict, on random requests."""

import pytest

from tests.prefix_store.simulation import Simulation

SEEDS = (1, 2, 3, 4, 5)
OPERATIONS_PER_SEED = 4000


@pytest.mark.parametrize("seed", SEEDS)
def test_random_requests_find_what_the_naive_map_says_and_nothing_else(seed: int) -> None:
    simulation = Simulation(seed)

    simulation.run(OPERATIONS_PER_SEED)

    events = {
        "added",
        "duplicate",
        "private",
        "conflict",
        "evicted",
        "scored",
        "scored with room",
        "more listed",
        "nothing to allocate",
        "lost KV",
    }
    assert events <= simulation.seen.keys()
    assert simulation.store.stats().route_blocks_evicted > 0
    assert simulation.store.stats().score_blocks_evicted > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_all_counts_are_zero_once_every_request_ended_and_everything_was_evicted(
    seed: int,
) -> None:
    simulation = Simulation(seed)
    simulation.run(100)

    simulation.drain()

    stats = simulation.store.stats()
    assert (stats.num_nodes, stats.kv_bytes, stats.route_bytes, stats.kv_blocks_leased) == (
        0,
        0,
        0,
        0,
    )
    assert stats.kv_blocks_used == (0, 0)
