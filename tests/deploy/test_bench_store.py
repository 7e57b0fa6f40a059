"""`pointsman bench store` on small stores."""

import json
import sys
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.types import Rank
from deploy.bench import store
from deploy.bench.filled_store import (
    BLOCK_SIZE,
    NAMESPACE,
    OWN_BLOCKS,
    PATH_NODES,
    SHARED_BLOCKS,
    FilledStore,
)
from deploy.cli import main

NUM_BLOCKS = 2000


@pytest.fixture(scope="module")
def filled() -> FilledStore:
    return FilledStore(NUM_BLOCKS, ep_size=2)


def test_the_store_is_full_and_stays_so(filled: FilledStore) -> None:
    full = NUM_BLOCKS * BLOCK_SIZE * 80
    assert filled.store.stats().route_bytes == full

    for number in range(20):
        store.measure(filled, Rank(number % 2))

    assert filled.store.stats().route_bytes == full
    filled.store.check_invariants()


def test_the_shared_prefix_is_a_path_of_twelve_nodes_with_kv_on_every_rank(
    filled: FilledStore,
) -> None:
    store.measure(filled, Rank(0))
    prompt = filled.prompt()
    path = filled.store._find(NAMESPACE, filled.store._keys(prompt))

    assert filled.store.match(NAMESPACE, prompt).num_kv_tokens == (SHARED_BLOCKS * BLOCK_SIZE,) * 2
    assert (len(path.nodes), path.end_block) == (PATH_NODES, SHARED_BLOCKS)
    assert (len(prompt), OWN_BLOCKS) == (4000, 32)


def test_every_size_has_a_row_with_times_memory_and_build_time() -> None:
    rows = store.run(ep_size=4, max_blocks=10_000, repeats=3)

    assert [row["blocks"] for row in rows] == [1000, 10_000]
    for row in rows:
        assert row["nodes"] > PATH_NODES
        assert row["repeats"] == 3
        assert 0 < row["match_us_p50"] <= row["match_us_p99"]
        assert 0 < row["insert_us_p50"] <= row["insert_us_p99"]
        assert row["match_insert_us_p50"] > row["match_us_p50"]
        assert row["release_us_p50"] > 0
        assert row["bytes_per_block"] > row["route_bytes_per_block"] == 1280
        assert row["build_cpu_seconds"] > 0


def test_held_bytes_count_each_object_once_and_no_code() -> None:
    text, numbers = "x" * 1000, [1.5]
    twice = [text, text, numbers, FilledStore, store.run]

    assert store.held_bytes(twice) == sum(map(sys.getsizeof, (twice, text, numbers, 1.5)))


@pytest.mark.parametrize(
    ("ep_size", "max_blocks", "repeats"), [(0, 1000, 1), (4, 999, 1), (1, 1000, 0)]
)
def test_numbers_that_leave_nothing_to_measure_are_refused(
    ep_size: int, max_blocks: int, repeats: int
) -> None:
    with pytest.raises(ConfigError, match="--max-blocks"):
        store.run(ep_size, max_blocks, repeats)


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "store.json"

    assert (
        main(["bench", "store", "--max-blocks", "1000", "--repeats", "2", "--json", str(file)]) == 0
    )

    written = json.loads(file.read_text())
    assert set(written) == {"machine", "command", "rows"}
    assert [row["blocks"] for row in written["rows"]] == [1000]
    assert "| blocks | nodes |" in capsys.readouterr().out
