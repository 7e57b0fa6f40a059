"""Requests of real traces: the store finds the blocks that the trace's ids say, and the naive dict finds."""

from pathlib import Path

import numpy as np
import pytest

from tests.prefix_store.traces import (
    TRACE_BLOCK,
    Hits,
    TraceRow,
    hits_of_dict,
    hits_of_store,
    make_trace_store,
    read_rows,
    synthetic_rows,
    token_ids_of,
)

PUBLISHED = {
    "mooncake_conversation_00-20min.jsonl.gz": Hits(97_495, 66_497, 30_998, 26),
    "mooncake_synthetic_0000-0500s.jsonl.gz": Hits(45_893, 31_666, 14_227, 35),
}
"""Blocks asked for, distinct ids, hit blocks, and rows whose every block hit: the numbers that come with the cuts."""
SEEDS = (1, 2, 3, 4)


@pytest.fixture(params=PUBLISHED)
def trace(request: pytest.FixtureRequest) -> tuple[list[TraceRow], Hits]:
    directory = Path(request.config.getoption("--traces"))
    return read_rows(directory / request.param), PUBLISHED[request.param]


@pytest.mark.traces
@pytest.mark.timeout(600)
def test_a_store_that_forgets_nothing_hits_what_the_trace_says(
    trace: tuple[list[TraceRow], Hits],
) -> None:
    rows, expected = trace
    store = make_trace_store(expected.distinct_blocks)

    hits = hits_of_store(store, rows)

    assert hits == expected
    assert store.stats().kv_blocks_free == (0,)
    assert store.stats().kv_blocks_evicted == 0
    store.check_invariants()


@pytest.mark.parametrize("seed", SEEDS)
def test_on_a_trace_drawn_at_random_store_and_dict_hit_the_same_blocks(seed: int) -> None:
    rows = synthetic_rows(seed)
    store = make_trace_store(sum(len(row.hash_ids) for row in rows))

    hits = hits_of_store(store, rows)

    assert hits == hits_of_dict(rows)
    assert 0 < hits.hit_blocks < hits.blocks
    assert hits.full_rows > 0
    store.check_invariants()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_with_less_room_than_the_trace_hits_less_and_stays_sound(seed: int) -> None:
    rows = synthetic_rows(seed)
    everything = hits_of_dict(rows)
    store = make_trace_store(max(len(row.hash_ids) for row in rows) + 50)

    hits = hits_of_store(store, rows)

    assert store.stats().kv_blocks_evicted > 0
    assert 0 < hits.hit_blocks < everything.hit_blocks
    store.check_invariants()


def test_the_columns_are_those_of_the_published_traces(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n'
    )

    assert read_rows(file) == [TraceRow(27482, 600, 52, (46, 47))]


def test_an_id_has_the_same_tokens_wherever_it_stands_and_no_other_id_has_them() -> None:
    several = token_ids_of((5, 70_000, 5)).reshape(3, TRACE_BLOCK)

    assert np.array_equal(several[0], several[2])
    assert np.array_equal(several[1], token_ids_of((70_000,)))
    assert not np.array_equal(several[0], several[1])
