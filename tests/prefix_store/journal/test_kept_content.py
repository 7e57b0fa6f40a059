"""What comes back is what the store held: random traffic, snapshots in the middle of it, crashes at any byte."""

import shutil
from io import BytesIO
from pathlib import Path
from random import Random

import numpy as np
import pytest

from cluster.scores import TokenScores
from prefix_store.journal.block_index import BlockIndex, Place
from prefix_store.journal.journal import SLICE_SECONDS
from prefix_store.journal.records import RecordReader, RoutesRecord, read_header
from tests.prefix_store.builders import BLOCK_SIZE, NAMESPACE, finish, gates, tokens, write
from tests.prefix_store.journal.kept import (
    SIZES,
    Clock,
    Content,
    FlakyDisk,
    close,
    held,
    is_prefix_closed,
    kept_file,
    limits,
    on_disk,
    open_store,
    settle,
    state_of,
    wait_until,
)
from tests.prefix_store.journal.traffic import Traffic, scores_of

SEEDS = (1, 2, 3)
ENOUGH = {"max_route_blocks": 1000, "max_score_blocks": 1000}
"""Nothing is evicted: what is, may still be on disk."""


def assert_was_published(content: Content) -> None:
    """Every block has the routes of one of the two gates there are, and the scores of its prefix."""
    assert is_prefix_closed(content)
    for (namespace, joined), (ids, weights, row) in content.items():
        token_ids = np.frombuffer(joined, np.int32)
        end = len(token_ids) // BLOCK_SIZE
        possible = [
            gates(token_ids, end - 1, end, variants=frozenset(variants))
            for variants in ((), (end - 1,))
        ]
        assert (ids, weights) in [
            (r.topk_ids.tobytes(), r.topk_weights.tobytes()) for r in possible
        ]
        if row is not None:
            expected = scores_of(namespace, token_ids, len(token_ids) - BLOCK_SIZE, len(token_ids))
            found = np.frombuffer(row, expected.rows.dtype)
            known = ~np.isnan(found["chosen_logprob"])
            assert found[known].tolist() == expected.rows[known].tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_that_is_opened_again_holds_what_it_held(tmp_path: Path, seed: int) -> None:
    traffic, store = Traffic(seed), open_store(tmp_path, **ENOUGH)
    traffic.run(store, 60)
    traffic.end(store)
    before = held(store, traffic.sequences)
    close(store)

    again = open_store(tmp_path, **ENOUGH)

    again.check_invariants()
    assert held(again, traffic.sequences) == before
    close(again)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_snapshot_beside_traffic_and_its_journal_hold_what_the_store_holds(
    tmp_path: Path, seed: int
) -> None:
    """One node of the walk between two requests, which split, extend and evict what waits for its turn."""
    traffic = Traffic(seed)
    clock = Clock(tick=SLICE_SECONDS)
    store = open_store(tmp_path, clock=clock)
    for _ in range(4):
        traffic.run(store, 20)
        store.evict("scores")  # whatever was on disk is gone: the snapshot has to have it
        for _ in range(25):
            store.upkeep()
            traffic.request(store)
        settle(store)
    traffic.end(store)
    before = held(store, traffic.sequences)
    state = state_of(store)
    close(store)

    after = on_disk(tmp_path)

    assert state.snapshots >= 4
    assert before.items() <= after.items()
    assert_was_published(after)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_a_disk_fails_at_everything_is_on_it_once_it_works_again(
    tmp_path: Path, seed: int
) -> None:
    traffic, clock = Traffic(seed), Clock(tick=SLICE_SECONDS)
    disk = FlakyDisk(Random(seed))
    store = open_store(tmp_path, open_file=disk.open, clock=clock, writer=limits(fsync_seconds=0))
    for _ in range(3):
        disk.share = 0.2
        for _ in range(30):
            traffic.request(store)
            clock.now += traffic.random.choice([0.0, 100.0])
            store.upkeep()
            wait_until(lambda: not state_of(store).waiting_bytes)
        disk.share = 0.0
        settle(store, clock)
        assert state_of(store).error == ""
    traffic.end(store)
    settle(store, clock)
    before = held(store, traffic.sequences)
    close(store)

    after = on_disk(tmp_path)

    assert disk.num_failures > 3
    assert before.items() <= after.items()
    assert_was_published(after)


@pytest.mark.parametrize("seed", SEEDS)
def test_files_cut_or_changed_anywhere_bring_back_beginnings_of_what_was_published(
    tmp_path: Path, seed: int
) -> None:
    traffic, store = Traffic(seed), open_store(tmp_path / "whole", max_route_blocks=32)
    traffic.run(store, 30)
    store.evict("scores")
    settle(store)
    traffic.run(store, 30)
    close(store)
    whole = on_disk(tmp_path / "whole")
    lost = set()
    for number in range(30):
        damaged = tmp_path / f"damaged-{number}"
        shutil.copytree(tmp_path / "whole", damaged)
        file = traffic.random.choice(sorted(damaged.glob("*.state")))
        content = bytearray(file.read_bytes())
        at = traffic.random.randrange(len(content))
        if traffic.random.random() < 0.5:
            del content[at:]
        else:
            content[at] ^= 1 << traffic.random.randrange(8)
        file.write_bytes(content)

        after = on_disk(damaged)

        assert_was_published(after)
        assert after.keys() <= traffic.blocks
        lost.add(len(whole) - len(after))
    assert max(lost) > 0
    assert min(lost) < len(whole)


def test_of_several_alternatives_the_first_comes_back_and_more_can_be_recorded(
    tmp_path: Path,
) -> None:
    token_ids, store = tokens(8), open_store(tmp_path)
    written = write(store, token_ids)
    longer = TokenScores.unknown(8, 4)
    longer.rows["chosen_logprob"] = -np.arange(8)
    longer.further["token_id"] = 7
    assert store.record_scores(written.lease, 0, longer) == 8
    finish(store, written)
    close(store)

    again = open_store(tmp_path)

    again.check_invariants()
    lease = again.acquire(NAMESPACE, token_ids, 8)
    found = again.scores(lease, 0, 8, 5)
    assert found.num_listed.tolist() == [1] * 8
    assert found.rows["chosen_logprob"].tolist() == longer.rows["chosen_logprob"].tolist()
    assert again.record_scores(lease, 0, longer) == 8
    again.check_invariants()
    again.release(lease)
    close(again)


def test_a_journal_cut_at_each_of_its_bytes_gives_the_records_before_the_cut(
    tmp_path: Path,
) -> None:
    content = kept_file(tmp_path, tokens(2 * BLOCK_SIZE), tokens(4 * BLOCK_SIZE)).read_bytes()
    numbers = []
    for size in range(len(content) + 1):
        stream, index = BytesIO(content[:size]), BlockIndex(SIZES)
        if read_header(stream) is not None:
            reader = RecordReader(stream, SIZES)
            for start, record in reader:
                assert isinstance(record, RoutesRecord)
                index.add_routes(record, Place(0, start))
            assert reader.end <= size
        numbers.append(len(index.names))
    assert numbers == sorted(numbers)
    assert set(numbers) == {0, 2, 4}
    assert numbers.count(4) == 1
