"""`pointsman bench store` on small stores."""

import gc
import json
import sys
import time
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.scores import SCORE_BYTES
from cluster.types import Rank
from deploy.bench import store
from deploy.bench.call_times import CallClock, CallTime
from deploy.bench.filled_store import (
    BLOCK_SIZE,
    LONG_EDGES,
    NAMESPACE,
    OWN_BLOCKS,
    PATH_NODES,
    SHARED_BLOCKS,
    SHORT_EDGES,
    FilledStore,
)
from deploy.bench.held_bytes import held_bytes
from deploy.cli import main

NUM_BLOCKS = 2000


@pytest.fixture(scope="module", params=[LONG_EDGES, SHORT_EDGES], ids=["long", "short"])
def filled(request: pytest.FixtureRequest) -> FilledStore:
    return FilledStore(NUM_BLOCKS, ep_size=2, filler_blocks=request.param)


def test_the_store_is_full_of_routes_and_scores_and_stays_so(filled: FilledStore) -> None:
    full = (NUM_BLOCKS * BLOCK_SIZE * 80, NUM_BLOCKS * BLOCK_SIZE * SCORE_BYTES)
    stats = filled.store.stats()
    assert (stats.route_bytes, stats.score_bytes) == full

    for number in range(20):
        store.measure(filled, Rank(number % 2), CallClock())
        filled.refill(OWN_BLOCKS)

    stats = filled.store.stats()
    assert (stats.route_bytes, stats.score_bytes) == full
    filled.store.check_invariants()


def test_the_shared_prefix_is_a_path_of_twelve_nodes_with_kv_on_every_rank(
    filled: FilledStore,
) -> None:
    store.measure(filled, Rank(0), CallClock())
    prompt = filled.prompt()
    path = filled.store._find(NAMESPACE, filled.store._keys(prompt))

    assert filled.store.match(NAMESPACE, prompt).num_kv_tokens == (SHARED_BLOCKS * BLOCK_SIZE,) * 2
    assert (len(path.nodes), path.end_block) == (PATH_NODES, SHARED_BLOCKS)
    assert (len(prompt), OWN_BLOCKS) == (4000, 32)


def test_short_edges_make_as_many_nodes_as_the_row_is_named_after() -> None:
    blocks = store.BLOCKS_BY_NODES[1000]
    filled = FilledStore(blocks, ep_size=4, filler_blocks=SHORT_EDGES)
    for number in range(3 * blocks // (5 * OWN_BLOCKS)):
        store.measure(filled, Rank(number % 4), CallClock())
        filled.refill(4 * OWN_BLOCKS)
    assert 1000 <= filled.store.stats().num_nodes <= 1150


def test_every_size_has_a_row_with_times_memory_and_build_time() -> None:
    rows = store.run(ep_size=4, max_blocks=10_000, max_nodes=1000, repeats=3)

    assert [(row["edges"], row["blocks"]) for row in rows] == [
        ("long", 1000),
        ("long", 10_000),
        ("short", 2400),
    ]
    for row in rows:
        assert row["nodes"] > PATH_NODES
        assert row["repeats"] == 3
        assert 0 < row["match_us_p50"] <= row["match_us_p99"]
        assert row["insert_us_p50"] > row["publish_us_p50"] > 0
        assert row["match_insert_us_p50"] > row["match_us_p50"]
        assert row["match_insert_scores_us_p50"] > row["match_insert_us_p50"]
        assert row["allocate_us_p50"] > 0
        assert row["release_us_p50"] > 0
        assert 0 < row["cpu_without_collector_us_p99"] <= row["cpu_us_p99"]
        assert row["full_collection_ms"] > 0
        assert row["bytes_per_block"] > row["route_bytes_per_block"] == 1280
        assert row["build_cpu_seconds"] > 0


def test_the_sum_is_of_all_that_a_request_asks_of_the_index() -> None:
    times = [CallTime(float(10**n), 0.0, 0.0) for n in range(7)]
    sample = store.Sample(*times)
    assert sample.insert.wall == 10**2 + 10**3 + 10**4
    assert sample.match_insert_scores.wall == 1 + sample.insert.wall + 10**5


def test_a_call_that_makes_the_collector_run_is_told_from_its_own_work() -> None:
    clock = CallClock()
    garbage = [[number] for number in range(100_000)]
    with clock.watching():
        _, collecting = clock.time(gc.collect)
        _, working = clock.time(lambda: sum(range(1000)))
    assert len(garbage) == 100_000
    assert 0 < collecting.garbage <= collecting.cpu
    assert working.garbage == 0
    assert working.cpu > 0


def test_a_call_that_waits_takes_time_and_no_cpu() -> None:
    _, waiting = CallClock().time(lambda: time.sleep(0.05))
    assert waiting.wall >= 50_000
    assert waiting.cpu < waiting.wall / 2


def test_held_bytes_count_each_object_once_and_no_code() -> None:
    text, numbers = "x" * 1000, [1.5]
    twice = [text, text, numbers, FilledStore, store.run]

    assert held_bytes(twice) == sum(map(sys.getsizeof, (twice, text, numbers, 1.5)))


@pytest.mark.parametrize(
    ("ep_size", "max_blocks", "max_nodes", "repeats"),
    [(0, 1000, 0, 1), (4, 999, 999, 1), (1, 1000, 1000, 0)],
)
def test_numbers_that_leave_nothing_to_measure_are_refused(
    ep_size: int, max_blocks: int, max_nodes: int, repeats: int
) -> None:
    with pytest.raises(ConfigError, match=f"--max-nodes {max_nodes}"):
        store.run(ep_size, max_blocks, max_nodes, repeats)


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "store.json"
    sizes = ["--max-blocks", "1000", "--max-nodes", "0", "--repeats", "2"]

    assert main(["bench", "store", *sizes, "--json", str(file)]) == 0

    written = json.loads(file.read_text())
    assert set(written) == {"machine", "command", "rows"}
    assert [row["blocks"] for row in written["rows"]] == [1000]
    assert "| edges | blocks | nodes |" in capsys.readouterr().out
