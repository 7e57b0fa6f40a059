"""Scores in the store: filled in, never changed, cut with their node, evicted by their own budget."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cluster.errors import StoreError
from cluster.namespace import model_fingerprint, namespace_of
from cluster.scores import ALTERNATIVE_BYTES, SCORE_BYTES, TokenScores, no_alternatives
from prefix_store.store import PrefixStore
from tests.prefix_store.builders import (
    BLOCK_SIZE,
    NAMESPACE,
    RANK0,
    branch,
    finish,
    insert,
    make_store,
    tokens,
    write,
)

TraceFunction = Callable[[FrameType, str, Any], Any]


def made(values: list[float]) -> TokenScores:
    """NaN: none."""
    scores = TokenScores.unknown(len(values))
    scores.rows["chosen_logprob"] = values
    scores.rows["top_id"] = np.arange(len(values))
    scores.rows["top_logprob"] = np.array(values) / 2
    return scores


def falling(first: int, end: int) -> TokenScores:
    return made([-float(position) for position in range(first, end)])


def read(store: PrefixStore, length: int, own: int = 0) -> list[float]:
    """What the store knows of tokens(length), or of branch(length, own)."""
    token_ids = branch(length, own) if own else tokens(length)
    lease = store.acquire(NAMESPACE, token_ids, store.match(NAMESPACE, token_ids).num_route_tokens)
    values: list[float] = store.scores(lease, 0, lease.num_tokens).rows["chosen_logprob"].tolist()
    store.release(lease)
    return values


def test_scores_are_found_where_they_were_recorded_and_nowhere_else() -> None:
    store = make_store(max_score_blocks=8)
    written = write(store, tokens(12))
    assert store.record_scores(written.lease, 3, falling(3, 10)) == 7
    store.check_invariants()
    assert store.scores(written.lease, 2, 11).known.tolist() == [False, *[True] * 7, False]
    part = store.scores(written.lease, 5, 9).rows
    assert part["chosen_logprob"].tolist() == [-5, -6, -7, -8]
    assert part["top_logprob"].tolist() == [-2.5, -3, -3.5, -4]
    finish(store, written)
    store.check_invariants()
    assert store.stats().score_bytes == 3 * BLOCK_SIZE * SCORE_BYTES


def test_what_is_recorded_first_stays() -> None:
    store = make_store(max_score_blocks=8)
    written = write(store, tokens(8))
    nan = float("nan")
    store.record_scores(written.lease, 0, made([nan, -1, nan, -3]))
    assert store.record_scores(written.lease, 0, made([-10, -11, -12, -13])) == 2
    assert store.scores(written.lease, 0, 4).rows["chosen_logprob"].tolist() == [-10, -1, -12, -3]


def test_what_is_read_is_a_copy() -> None:
    store = make_store(max_score_blocks=8)
    written = write(store, tokens(4))
    store.record_scores(written.lease, 0, falling(0, 4))
    store.scores(written.lease, 0, 4).rows["chosen_logprob"] = 5
    assert store.scores(written.lease, 0, 4).rows["chosen_logprob"].tolist() == [0, -1, -2, -3]


@pytest.mark.parametrize("shared", [4, 8, 12])
def test_a_split_takes_the_scores_of_each_half_along(shared: int) -> None:
    store = make_store(max_score_blocks=16)
    written = write(store, tokens(16))
    store.record_scores(written.lease, 0, falling(0, 16))
    finish(store, written)
    insert(store, branch(shared, 8))
    store.check_invariants()
    assert read(store, 16) == [-float(position) for position in range(16)]
    known = read(store, shared, own=8)
    assert known[:shared] == [-float(position) for position in range(shared)]
    assert all(np.isnan(known[shared:]))


def test_the_budget_evicts_the_scores_used_longest_ago_and_nothing_else() -> None:
    store = make_store(max_score_blocks=3)
    for first in (0, 1000, 2000):
        written = write(store, tokens(8, first=first))
        store.record_scores(written.lease, 0, falling(0, 8))
        finish(store, written)
        store.check_invariants()
    stats = store.stats()
    assert stats.score_bytes == 3 * BLOCK_SIZE * SCORE_BYTES
    assert (stats.score_blocks_evicted, stats.route_blocks_evicted) == (3, 0)
    assert store.match(NAMESPACE, tokens(8)).num_kv_tokens[RANK0] == 8
    known = [
        int(np.isfinite(store.scores(lease, 0, 8).rows["chosen_logprob"]).sum())
        for first in (0, 1000, 2000)
        for lease in [store.acquire(NAMESPACE, tokens(8, first=first), 8)]
    ]
    assert known == [0, 4, 8]


def test_scores_of_leased_nodes_stay_and_what_finds_no_room_is_not_recorded() -> None:
    store = make_store(max_score_blocks=2)
    first, second = write(store, tokens(8)), write(store, tokens(8, first=1000))
    assert store.record_scores(first.lease, 0, falling(0, 8)) == 8
    assert store.record_scores(second.lease, 0, falling(0, 8)) == 0
    store.check_invariants()
    finish(store, first)
    assert store.record_scores(second.lease, 0, falling(0, 4)) == 4
    store.check_invariants()


@pytest.mark.parametrize("part", ["scores", "routes", "all"])
def test_eviction_by_command_counts_the_scores_that_go(part: str) -> None:
    store = make_store(max_score_blocks=8)
    written = write(store, tokens(8))
    store.record_scores(written.lease, 0, falling(0, 8))
    before = store.stats()
    assert store.evict(part).kept_leased == 1
    finish(store, written)
    eviction = store.evict(part)
    store.check_invariants()
    after = store.stats()
    assert after.score_bytes == 0
    freed = before.score_bytes
    if part != "scores":
        freed += before.route_bytes + before.kv_bytes
    assert eviction.num_bytes == freed
    assert store.match(NAMESPACE, tokens(8)).num_route_tokens == (8 if part == "scores" else 0)


def test_kv_that_goes_leaves_the_scores() -> None:
    store = make_store(max_score_blocks=8)
    written = write(store, tokens(8))
    store.record_scores(written.lease, 0, falling(0, 8))
    finish(store, written)
    store.evict("kv")
    assert read(store, 8) == [-float(position) for position in range(8)]
    assert store.evict("scores").nodes == 1
    assert store.evict("scores").nodes == 0


def test_a_range_beyond_the_lease_is_refused() -> None:
    store = make_store(max_score_blocks=8)
    written = write(store, tokens(8))
    with pytest.raises(StoreError, match=r"tokens \[4, 9\) under a lease of 8 tokens"):
        store.scores(written.lease, 4, 9)
    with pytest.raises(StoreError, match=r"tokens \[6, 10\) under a lease of 8 tokens"):
        store.record_scores(written.lease, 6, falling(0, 4))


def test_weights_of_another_content_find_nothing_of_what_was_stored_under_the_same_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    namespaces = []
    for value in (1.0, 2.0):
        save_file({"w": np.full(8, value, np.float32)}, tmp_path / "model.safetensors")
        model = model_fingerprint(tmp_path, "float32")
        namespaces.append(namespace_of(model, block_size=BLOCK_SIZE, tenant=None, cache_salt=None))
    store = make_store(max_score_blocks=8)
    written = write(store, tokens(12), namespace=namespaces[0])
    store.record_scores(written.lease, 0, falling(0, 12))
    finish(store, written)
    before, after = (store.match(namespace, tokens(12)) for namespace in namespaces)
    assert (before.num_route_tokens, before.num_kv_tokens[RANK0]) == (12, 12)
    assert (after.num_route_tokens, after.num_kv_tokens[RANK0]) == (0, 0)
    again = write(store, tokens(12), namespace=namespaces[1])
    assert not store.scores(again.lease, 0, 12).known.any()
    finish(store, again)
    assert store.match(namespaces[0], tokens(12)) == before
    store.check_invariants()


def test_a_range_is_found_whatever_else_its_node_holds() -> None:
    store = make_store(num_kv_blocks=64, max_score_blocks=64)
    written = write(store, tokens(256))
    assert store.record_scores(written.lease, 250, falling(250, 256)) == 6
    assert store.record_scores(written.lease, 0, falling(0, 256)) == 250
    for start, end in ((0, 3), (97, 106), (128, 128), (255, 256)):
        found = store.scores(written.lease, start, end).rows["chosen_logprob"]
        assert found.tolist() == [-float(position) for position in range(start, end)]


def test_one_block_costs_the_same_at_the_end_of_a_leaf_however_long_that_is() -> None:
    costs = []
    for num_blocks in (16, 1024):
        store = make_store(num_kv_blocks=num_blocks, max_score_blocks=num_blocks)
        end = num_blocks * BLOCK_SIZE
        written = write(store, tokens(end))
        last = end - BLOCK_SIZE
        costs.append(
            (
                num_lines_run(
                    partial(store.record_scores, written.lease, last, falling(last, end))
                ),
                num_lines_run(partial(store.scores, written.lease, last, end)),
            )
        )
        store.record_scores(written.lease, 0, falling(0, end))
        costs[-1] += (num_lines_run(partial(store.scores, written.lease, last, end)),)
    assert costs[0] == costs[1]


def test_eviction_takes_the_last_scores_of_a_node_first() -> None:
    store = make_store(max_score_blocks=4)
    first = write(store, tokens(16))
    store.record_scores(first.lease, 0, falling(0, 16))
    finish(store, first)
    second = write(store, tokens(8, first=1000))
    assert store.record_scores(second.lease, 0, falling(0, 8)) == 8
    store.check_invariants()
    known = [-float(position) for position in range(8)]
    assert read(store, 16)[:8] == known
    assert np.isnan(read(store, 16)[8:]).all()
    assert store.stats().score_blocks_evicted == 2


def test_the_first_blocks_are_recorded_when_the_budget_has_no_room_for_all() -> None:
    store = make_store(max_score_blocks=2)
    written = write(store, tokens(16))
    assert store.record_scores(written.lease, 2, falling(2, 16)) == 2 + BLOCK_SIZE
    assert (
        store.scores(written.lease, 0, 16).known.tolist() == [False] * 2 + [True] * 6 + [False] * 8
    )
    store.check_invariants()


def listing(first: int, end: int, num_listed: int, *, offset: float = 0.0) -> TokenScores:
    """Of tokens [first, end); alternative i of token t is 100 t + i."""
    scores = falling(first, end)
    scores.rows["chosen_logprob"] -= offset
    further = no_alternatives(end - first, num_listed - 1)
    further["token_id"] = 100 * np.arange(first, end)[:, None] + np.arange(1, num_listed)
    further["logprob"] = -further["token_id"]
    return TokenScores(scores.rows, further)


def num_listed_of(store: PrefixStore, length: int, asked: int) -> list[int]:
    lease = store.acquire(NAMESPACE, tokens(length), length)
    listed: list[int] = store.scores(lease, 0, length, asked).num_listed.tolist()
    store.release(lease)
    return listed


def score_bytes(num_blocks: int, num_listed: int) -> int:
    return num_blocks * BLOCK_SIZE * (SCORE_BYTES + (num_listed - 1) * ALTERNATIVE_BYTES)


def test_alternatives_are_found_as_far_as_they_are_asked() -> None:
    store = make_store(max_score_blocks=16)
    written = write(store, tokens(12))
    assert store.record_scores(written.lease, 2, listing(2, 11, 5)) == 9
    store.check_invariants()
    assert store.stats().score_bytes == score_bytes(3, 5)
    for asked in (1, 2, 5, 20):
        found = store.scores(written.lease, 1, 12, asked)
        assert found.num_listed.tolist() == [0] + [min(asked, 5)] * 9 + [0]
        assert found.num_further == asked - 1
    part = store.scores(written.lease, 3, 5, 3)
    assert part.further["token_id"].tolist() == [[301, 302], [401, 402]]
    finish(store, written)
    store.check_invariants()


def test_more_alternatives_take_the_place_of_fewer_and_never_the_other_way() -> None:
    store = make_store(max_score_blocks=64)
    written = write(store, tokens(12))
    sizes = []
    for num_listed, taken in ((1, 12), (3, 12), (2, 0), (1, 0), (5, 12)):
        recorded = listing(0, 12, num_listed, offset=num_listed)
        assert store.record_scores(written.lease, 0, recorded) == taken
        store.check_invariants()
        sizes.append(store.stats().score_bytes)
    assert sizes == [score_bytes(3, n) for n in (1, 3, 3, 3, 5)]
    found = store.scores(written.lease, 0, 12, 5)
    assert found.rows["chosen_logprob"].tolist() == [-5.0 - position for position in range(12)]
    assert found.further["token_id"][2].tolist() == [201, 202, 203, 204]


def test_tokens_of_one_block_may_list_different_numbers() -> None:
    store = make_store(max_score_blocks=16)
    written = write(store, tokens(8))
    store.record_scores(written.lease, 0, falling(0, 7))
    assert store.record_scores(written.lease, 2, listing(2, 4, 5)) == 2
    assert store.record_scores(written.lease, 3, listing(3, 6, 3)) == 2
    store.check_invariants()
    finish(store, written)
    assert num_listed_of(store, 8, 20) == [1, 1, 5, 5, 3, 3, 1, 0]
    assert store.stats().score_bytes == score_bytes(1, 5) + score_bytes(1, 3)


@pytest.mark.parametrize("shared", [4, 8, 12])
def test_a_split_takes_the_alternatives_of_each_half_along(shared: int) -> None:
    store = make_store(max_score_blocks=64)
    written = write(store, tokens(16))
    store.record_scores(written.lease, 0, listing(0, 16, 4))
    finish(store, written)
    insert(store, branch(shared, 8))
    store.check_invariants()
    assert num_listed_of(store, 16, 20) == [4] * 16
    assert np.isnan(read(store, shared, own=8)[shared:]).all()


def test_alternatives_count_in_the_budget_and_go_with_their_block() -> None:
    store = make_store(max_score_blocks=10)  # three blocks of 5 and one of 1
    for first in (0, 1000):
        written = write(store, tokens(8, first=first))
        assert store.record_scores(written.lease, 0, listing(0, 8, 5)) == 8
        finish(store, written)
        store.check_invariants()
    assert store.stats().score_bytes == score_bytes(3, 5)
    assert num_listed_of(store, 8, 20) == [5] * 4 + [0] * 4
    written = write(store, tokens(4, first=2000))
    store.record_scores(written.lease, 0, falling(0, 4))
    assert store.stats().score_bytes == score_bytes(3, 5) + score_bytes(1, 1)
    store.check_invariants()
    finish(store, written)
    before = store.stats()
    assert store.evict("scores").num_bytes == before.score_bytes
    assert store.stats().score_bytes == 0


def test_alternatives_without_room_leave_what_is_known_and_fill_in_what_is_not() -> None:
    store = make_store(max_score_blocks=2)
    written = write(store, tokens(8))
    store.record_scores(written.lease, 0, falling(0, 6))
    assert store.record_scores(written.lease, 0, listing(0, 8, 20, offset=5)) == 2
    store.check_invariants()
    found = store.scores(written.lease, 0, 8, 20)
    assert found.num_listed.tolist() == [1] * 8
    assert found.rows["chosen_logprob"].tolist() == [-0.0, -1, -2, -3, -4, -5, -11, -12]


def num_lines_run(call: Callable[[], object]) -> int:
    """Of Python, also in what it calls: a cost that no clock disturbs."""
    count = 0

    def on_event(_frame: FrameType, event: str, _argument: object) -> TraceFunction:
        nonlocal count
        count += event == "line"
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
