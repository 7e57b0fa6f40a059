"""Replays that travel by plans, under an engine over content workers: its answers, waits, releases and fallbacks."""

from typing import Any

import pytest

from router_service.cell_report import refresh_gauges
from tests.helpers.content_engine import assert_undisturbed, make_prompt, read_metrics
from tests.helpers.engines import CLIENT
from tests.helpers.planned_engine import (
    PlannedCell,
    fallbacks,
    make_planned_cell,
    num_planning_requests,
)


def make_replay(num_tokens: int = 32, **options: Any) -> tuple[PlannedCell, list[int]]:
    """An engine that has computed a prompt and lost its KV."""
    cell = make_planned_cell(**({"num_kv_blocks": 64, "budget": 64} | options))
    prompt = make_prompt(num_tokens, seed=5)
    cell.harness.generate("cold", prompt, 4)
    cell.harness.engine.evict("kv")
    return cell, prompt


def replay_ways(cell: PlannedCell) -> dict[str, float]:
    return read_metrics(cell.harness)("replayed_tokens_total")


def step_until_planned(cell: PlannedCell) -> None:
    for _ in range(20):
        if cell.workers.num_planned_tokens:
            return
        cell.harness.step()
    raise AssertionError("nothing travelled planned in 20 steps")


def test_a_replay_travels_planned_and_answers_like_the_first_time() -> None:
    cell, prompt = make_replay()
    assert_undisturbed(cell.harness.generate("r", prompt, 4), prompt, 4)
    assert replay_ways(cell) == {"planned": 32, "negotiated": 0}
    assert fallbacks(cell) == {}


def test_plans_that_ranks_hold_are_in_the_metrics() -> None:
    cell, prompt = make_replay()
    cell.harness.generate("r", prompt, 4)
    refresh_gauges(cell.harness.metrics, cell.harness.engine, cell.harness.store.stats())
    metrics = read_metrics(cell.harness)
    misses = metrics("plan_fragment_misses_total")[""]
    assert metrics("plan_fragments")[""] == misses > 0
    assert metrics("plan_fragment_bytes")[""] == cell.harness.plans.num_bytes > 0


@pytest.mark.parametrize("shared", [4, 12, 20, 28])
def test_plans_are_found_again_after_other_prompts_have_split_the_nodes_of_theirs(
    shared: int,
) -> None:
    cell, prompt = make_replay()
    assert_undisturbed(cell.harness.generate("first", prompt, 4), prompt, 4)
    misses = read_metrics(cell.harness)("plan_fragment_misses_total")[""]
    nodes = cell.harness.store.stats().num_nodes
    cell.harness.generate("other", [*prompt[:shared], *make_prompt(9, seed=6)], 2)
    assert cell.harness.store.stats().num_nodes > nodes
    cell.harness.engine.evict("kv")
    assert_undisturbed(cell.harness.generate("again", prompt, 4), prompt, 4)
    assert replay_ways(cell)["negotiated"] == 0
    assert read_metrics(cell.harness)("plan_fragment_misses_total")[""] == misses


def test_a_replay_finds_the_plans_of_its_salt_and_never_those_of_another() -> None:
    cell, prompt = make_planned_cell(num_kv_blocks=64, budget=64), make_prompt(32, seed=5)
    hits, misses = [], []
    for number, salt in enumerate(("a", "a", "b", "b", "a", "b", None, None)):
        cell.harness.submit(f"r{number}", prompt, 1, cache_salt=salt)
        cell.harness.run()
        cell.harness.engine.evict("kv")
        metrics = read_metrics(cell.harness)
        hits.append(metrics("plan_fragment_hits_total")[""])
        misses.append(metrics("plan_fragment_misses_total")[""])
    assert hits == [0, 0, 0, 0, 4, 8, 8, 8]
    assert misses == [0, 4, 4, 8, 8, 8, 8, 12]


def test_an_exchange_of_weights_drops_all_plans_here_and_at_the_ranks() -> None:
    cell, prompt = make_replay()
    cell.harness.generate("replays", prompt, 1)
    held = cell.book.num_fragments
    assert held == 4
    cell.harness.engine.settle()
    cell.harness.engine.exchange_weights("other weights", restart=False)
    assert (cell.book.num_fragments, cell.book.num_bytes) == (0, 0)
    cell.harness.generate("other", prompt, 1)
    assert cell.workers.num_evicted_fragments == held
    cell.check_invariants()


def test_the_end_of_the_replay_releases_the_plan() -> None:
    cell, prompt = make_replay()
    cell.harness.submit("r", prompt, 4)
    step_until_planned(cell)
    assert cell.workers.num_planned_tokens == 32
    cell.harness.step()
    assert cell.harness.generations["r"].completion is None
    assert num_planning_requests(cell) == 0


def test_an_abort_while_the_plan_is_under_way_releases_it() -> None:
    cell, prompt = make_replay(max_looks=50)
    cell.harness.submit("r", prompt, 4)
    cell.harness.step()
    before = num_planning_requests(cell)
    cell.harness.engine.abort(CLIENT, "r")
    assert (before, num_planning_requests(cell)) == (1, 0)


def test_an_abort_in_the_middle_of_a_replay_releases_the_plan() -> None:
    cell, prompt = make_replay(budget=8)
    cell.harness.submit("r", prompt, 4)
    step_until_planned(cell)
    before = num_planning_requests(cell)
    cell.harness.engine.abort(CLIENT, "r")
    assert (before, num_planning_requests(cell)) == (1, 0)


def test_a_request_that_ends_with_its_replay_releases_the_plan() -> None:
    cell, prompt = make_replay()
    assert_undisturbed(cell.harness.generate("r", prompt, 1), prompt, 1)
    assert num_planning_requests(cell) == 0


def test_a_preempted_request_replays_planned_and_releases_what_it_had() -> None:
    cell = make_planned_cell(num_kv_blocks=10, budget=8)
    older, younger = make_prompt(4, seed=1), make_prompt(20, seed=2)
    cell.harness.submit("older", older, 30)
    cell.harness.submit("younger", younger, 8)
    cell.harness.run()
    assert cell.harness.scheduler.num_preemptions > 0
    assert cell.workers.num_planned_tokens > 0
    assert num_planning_requests(cell) == 0
    assert_undisturbed(cell.harness.generations["older"], older, 30)
    assert_undisturbed(cell.harness.generations["younger"], younger, 8)


def test_a_plan_that_does_not_come_in_time_is_counted_and_done_without() -> None:
    cell, prompt = make_replay(max_looks=10**6, wait_seconds=0.0)
    assert_undisturbed(cell.harness.generate("r", prompt, 4), prompt, 4)
    assert replay_ways(cell) == {"planned": 0, "negotiated": 32}
    assert fallbacks(cell) == {"plan_not_ready": 32}


def test_a_step_budget_under_a_fragment_replays_negotiated_without_a_wait() -> None:
    cell, prompt = make_replay(budget=7)
    assert_undisturbed(cell.harness.generate("r", prompt, 4), prompt, 4)
    assert replay_ways(cell)["negotiated"] >= 24
    assert set(fallbacks(cell)) == {"step_budget", "no_border"}


@pytest.mark.parametrize("num_decoding", [0, 1, 4])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_replays_beside_each_other_and_beside_decodes_keep_to_borders(
    num_ranks: int, num_decoding: int
) -> None:
    cell = make_planned_cell(num_ranks, num_kv_blocks=1000, budget=64, fragment_tokens=16)
    prompts = {f"r{length}": make_prompt(length, seed=length) for length in range(40, 100, 8)}
    for request_id, prompt in prompts.items():
        cell.harness.generate(f"cold-{request_id}", prompt, 2)
    cell.harness.engine.evict("kv")
    for number in range(num_decoding):
        cell.harness.submit(f"decoding-{number}", make_prompt(5, seed=900 + number), 60)
    for _ in range(3 * bool(num_decoding)):
        cell.harness.step()
    for request_id, prompt in prompts.items():
        cell.harness.submit(request_id, prompt, 2)
    cell.harness.run()
    assert fallbacks(cell) == {}
    for request_id, prompt in prompts.items():
        assert_undisturbed(cell.harness.generations[request_id], prompt, 2)


def test_a_replay_does_not_wait_for_the_end_of_a_decode_that_leaves_it_no_room() -> None:
    cell, prompt = make_replay(budget=8)
    cell.harness.submit("decoding", make_prompt(3, seed=6), 100)
    cell.harness.step()
    cell.harness.step()
    cell.harness.submit("r", prompt, 4)
    for _ in range(12):
        cell.harness.step()
    assert_undisturbed(cell.harness.generations["r"], prompt, 4)
    assert cell.harness.generations["decoding"].completion is None


def test_without_any_plan_nobody_waits_for_room() -> None:
    cell = make_planned_cell(num_kv_blocks=64, budget=40, fragment_tokens=0)
    prompts = [make_prompt(32, seed=seed) for seed in (5, 6)]
    for number, prompt in enumerate(prompts):
        cell.harness.generate(f"cold-{number}", prompt, 1)
    cell.harness.engine.evict("kv")
    for number, prompt in enumerate(prompts):
        cell.harness.submit(f"r{number}", prompt, 1)
    cell.harness.step()
    assert cell.workers.steps[-1].replayed_tokens == {0: 40}


def test_switched_off_in_the_middle_of_a_replay_the_rest_goes_negotiated() -> None:
    cell, prompt = make_replay(budget=8)
    cell.harness.submit("r", prompt, 4)
    step_until_planned(cell)
    cell.harness.features.planned_dispatch = False
    cell.harness.run()
    assert_undisturbed(cell.harness.generations["r"], prompt, 4)
    assert fallbacks(cell) == {"planned_off": 24}
    assert num_planning_requests(cell) == 0
