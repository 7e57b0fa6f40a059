"""An engine that keeps routes and scores on disk, as operators see it: status, metrics, evictions, a failing disk."""

import errno
import time
from pathlib import Path

import pytest

from cluster.messages import (
    CellStatus,
    EvictCommand,
    EvictReport,
    MetricsQuery,
    MetricsText,
    UpdateWeights,
    WeightsUpdated,
)
from cluster.prefix_match import StateOnDisk
from prefix_store.journal.directory import StateDirectory
from prefix_store.journal.journal import Journal
from prefix_store.journal.loading import find_kept
from prefix_store.journal.records import BlockSizes, Header
from prefix_store.journal.writer import WriterLimits
from tests.helpers.content_cell import BLOCK_SIZE, PATIENCE, ContentCell
from tests.helpers.content_workers import SHAPE, oracle
from tests.helpers.other_weights import fingerprint_of

PROMPT = list(range(1, 4 * BLOCK_SIZE + 2))
NEW_TOKENS = 4
SIZES = BlockSizes.of(BLOCK_SIZE, SHAPE)
OTHER = "/other"


class ReadOnlyDirectory(StateDirectory):
    """What is in it stays."""

    def remove_before(self, generation: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system")


def header(fingerprint: str = "digests") -> Header:
    return Header.of(fingerprint, "fast", BLOCK_SIZE, SHAPE)


def keeping_cell(directory: StateDirectory, *, max_bytes: int = 2**24) -> ContentCell:
    return ContentCell(journal=Journal(directory, header(), SIZES, WriterLimits(max_bytes, 1.0)))


def ask(cell: ContentCell, request_id: str) -> None:
    cell.client.submit(request_id, PROMPT, NEW_TOKENS)
    cell.client.wait_for(request_id)
    assert cell.client.tokens[request_id] == oracle(PROMPT, NEW_TOKENS)[0]


def state_of(cell: ContentCell) -> StateOnDisk:
    state = cell.client.status().state
    assert state is not None
    return state


def written_state(cell: ContentCell) -> StateOnDisk:
    """Once nothing waits to be written."""
    deadline = time.monotonic() + PATIENCE
    while (state := state_of(cell)).waiting_bytes:
        assert time.monotonic() < deadline
    return state


def num_kept(path: Path, fingerprint: str = "digests") -> int:
    """Blocks that an engine of these weights would find."""
    directory = StateDirectory(path)
    kept = find_kept(directory, header(fingerprint), SIZES)
    directory.close()
    return kept.num_found


def test_an_engine_without_a_state_directory_says_that_it_has_none() -> None:
    with ContentCell() as cell:
        assert isinstance(status := cell.client.status(), CellStatus)
        assert status.state is None


def test_status_and_metrics_tell_of_the_state(tmp_path: Path) -> None:
    with keeping_cell(StateDirectory(tmp_path)) as cell:
        ask(cell, "r")
        state = written_state(cell)
        cell.client.send(MetricsQuery(5))
        text = cell.client.answer(MetricsText).text
    assert state.directory == str(tmp_path)
    assert state.num_bytes > 5 * SIZES.routes
    assert (state.runs_dropped, state.error) == (0, "")
    assert f"pointsman_state_bytes {float(state.num_bytes)}".encode() in text
    assert b"pointsman_state_failing 0.0" in text
    assert num_kept(tmp_path) == 5


def test_an_engine_that_is_started_again_replays_what_the_other_computed(tmp_path: Path) -> None:
    with keeping_cell(StateDirectory(tmp_path)) as cell:
        ask(cell, "r")
        assert cell.client.completions["r"].replayed_tokens == 0
    with keeping_cell(StateDirectory(tmp_path)) as cell:
        ask(cell, "r")
        assert cell.client.completions["r"].replayed_tokens == 4 * BLOCK_SIZE
        assert state_of(cell).blocks_loaded == 5


def test_an_eviction_is_answered_when_it_is_true_of_the_disk(tmp_path: Path) -> None:
    with keeping_cell(StateDirectory(tmp_path)) as cell:
        ask(cell, "r")
        written_state(cell)
        before = sorted(file.name for file in tmp_path.glob("*.state"))
        cell.client.send(EvictCommand(3, "all"))
        report = cell.client.answer(EvictReport)
        assert (report.query_id, report.part, report.failure) == (3, "all", "")
        assert report.nodes > 0
        assert not [name for name in before if (tmp_path / name).exists()]
    assert num_kept(tmp_path) == 0


def test_an_eviction_that_the_disk_refuses_is_answered_with_why(tmp_path: Path) -> None:
    with keeping_cell(ReadOnlyDirectory(tmp_path)) as cell:
        ask(cell, "r")
        cell.client.send(EvictCommand(3, "all"))
        assert cell.client.answer(EvictReport).failure == "Read-only file system"
        ask(cell, "again")


def test_nothing_of_earlier_weights_is_found_later(tmp_path: Path) -> None:
    with keeping_cell(StateDirectory(tmp_path)) as cell:
        ask(cell, "r")
        cell.client.send(UpdateWeights(7, OTHER, "abort"))
        cell.client.answer(WeightsUpdated)
        cell.client.submit("other", PROMPT, NEW_TOKENS)
        cell.client.wait_for("other")
    assert num_kept(tmp_path, fingerprint_of(OTHER)) == 5
    assert num_kept(tmp_path) == 0


def test_an_engine_whose_disk_takes_nothing_serves_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with keeping_cell(StateDirectory(tmp_path), max_bytes=300) as cell:
        ask(cell, "r")
        ask(cell, "again")
        written_state(cell)
        assert state_of(cell).error == "the files would exceed 300 bytes"
        cell.client.send(MetricsQuery(5))
        assert b"pointsman_state_failing 1.0" in cell.client.answer(MetricsText).text
    assert len([line for line in caplog.messages if "state is not written" in line]) == 1
