"""How far ahead of a request fragments are asked for, what is not made for nobody, and how much leaves at once."""

from threading import Event

import numpy as np
import numpy.typing as npt
import pytest

from cluster.placement import ExpertPlacement
from cluster.types import Rank
from prefix_store.compiler_thread import CompilerThread
from router_service.plans import PlannedRun, Unplanned
from tests.helpers.content_engine import assert_undisturbed, make_prompt, read_metrics
from tests.helpers.content_workers import SHAPE
from tests.helpers.plan_desk import (
    NUM_RANKS,
    SIZE,
    WAIT_SECONDS,
    Desk,
    cover_of,
    make_request,
    make_routes,
)
from tests.helpers.planned_engine import make_planned_cell

NO_MEMORY = Unplanned("plan_memory", wait=False, max_num_tokens=SIZE)


def bytes_of_one() -> int:
    desk = Desk()
    desk.planned(0)
    return desk.book.num_bytes


# --- short runs


@pytest.mark.parametrize(("num_routed", "num_asked"), [(15, 0), (16, 2), (17, 3)])
def test_a_run_under_the_shortest_is_neither_compiled_nor_waited_for(
    num_routed: int, num_asked: int
) -> None:
    desk, request = Desk(min_run_tokens=16), make_request(num_routed)
    desk.book.want(request)
    assert len(desk.compiler.asks) == num_asked
    short = Unplanned("too_short", wait=False)
    assert (cover_of(desk, request) == short) == (num_asked == 0)


def test_the_last_tokens_of_a_long_run_are_planned_with_it() -> None:
    desk = Desk(min_run_tokens=16)
    request = desk.planned(0, 2 * SIZE + 1)
    request.num_computed_tokens = 2 * SIZE
    assert cover_of(desk, request) == PlannedRun((2,), 1)


def test_a_run_counts_from_where_its_kv_ends() -> None:
    desk = Desk(min_run_tokens=16)
    request = make_request(64, num_computed=49)
    desk.book.want(request)
    assert desk.compiler.asks == {}
    assert cover_of(desk, request) == Unplanned("too_short", wait=False)


def test_a_long_run_that_was_not_wanted_while_planning_was_off_is_not_called_short() -> None:
    desk, request = Desk(min_run_tokens=16), make_request(32)
    desk.features.planned_dispatch = False
    desk.book.want(request)
    desk.features.planned_dispatch = True
    assert cover_of(desk, request) == Unplanned("planned_off", wait=False)


def test_with_planning_off_a_small_step_budget_is_not_to_blame() -> None:
    desk, request = Desk(fragment_tokens=0), make_request(SIZE)
    desk.features.planned_dispatch = False
    assert cover_of(desk, request) == Unplanned("planned_off", wait=False)


def test_a_hit_of_whole_blocks_replays_its_last_one_at_once() -> None:
    cell = make_planned_cell(num_kv_blocks=64, budget=64, min_run_tokens=8, max_looks=10**6)
    prompt = make_prompt(32, seed=5)
    cell.harness.generate("cold", prompt, 4)
    assert_undisturbed(cell.harness.generate("hit", prompt, 4), prompt, 4)
    metrics = read_metrics(cell.harness)
    assert metrics("replay_fallbacks_total")["too_short"] == 4
    assert metrics("plan_fragment_misses_total")[""] == 0


# --- the window


def test_fragments_are_asked_for_only_so_far_ahead() -> None:
    desk = Desk(ahead_tokens=3 * SIZE)
    request = desk.planned(0, 10 * SIZE)
    asked = [len(desk.compiler.asks)]
    for _ in range(3):
        request.num_computed_tokens += 2 * SIZE
        cover_of(desk, request)
        asked.append(len(desk.compiler.asks))
    assert asked == [3, 5, 7, 9]
    request.num_computed_tokens += 2 * SIZE
    cover_of(desk, request)
    assert len(desk.compiler.asks) == 10
    desk.book.check_invariants()


def test_fragments_that_a_request_has_passed_are_free_to_go() -> None:
    desk = Desk(ahead_tokens=SIZE, memory_bytes=bytes_of_one())
    request = desk.planned(0, 3 * SIZE)
    for number in range(3):
        request.num_computed_tokens = number * SIZE
        cover_of(desk, request)
        desk.make_ready()
        assert cover_of(desk, request) == PlannedRun((number,), SIZE)
        desk.book.check_invariants()
    assert desk.book.take_evicted() == [0, 1]


def test_a_request_that_left_the_borders_is_asked_for_from_the_next_one_on() -> None:
    desk = Desk(ahead_tokens=SIZE)
    request = desk.planned(0, 4 * SIZE)
    request.num_computed_tokens = 2 * SIZE + 3
    assert cover_of(desk, request) == Unplanned("no_border", wait=False, max_num_tokens=SIZE - 3)
    request.num_computed_tokens = 3 * SIZE
    cover_of(desk, request)
    desk.make_ready()
    assert cover_of(desk, request) == PlannedRun((1,), SIZE)
    (routes, _) = desk.compiler.asks[1]
    assert routes.same_ids(make_routes(1000).slice(3 * SIZE, 4 * SIZE))


def test_while_memory_is_full_of_fragments_in_use_nothing_more_is_compiled() -> None:
    desk = Desk(memory_bytes=bytes_of_one())
    first = desk.planned(0)
    second = desk.planned(1, 3 * SIZE)
    seen = [cover_of(desk, second) for _ in range(3)]
    assert seen == [NO_MEMORY] * 3
    assert len(desk.compiler.asks) == 1
    second.num_computed_tokens = SIZE
    assert cover_of(desk, second) == NO_MEMORY
    desk.book.release(first)
    assert cover_of(desk, second) == Unplanned("plan_not_ready", wait=True)
    assert len(desk.compiler.asks) == 2
    desk.book.check_invariants()


def test_a_fragment_larger_than_all_memory_is_compiled_once_and_never_again() -> None:
    desk = Desk(memory_bytes=1)
    for seed in range(3):
        request = desk.planned(seed)
        assert cover_of(desk, request) == NO_MEMORY
        desk.book.release(request)
    assert len(desk.compiler.asks) == 1


@pytest.mark.parametrize("memory_fragments", [1, 2, 5])
def test_a_prompt_far_beyond_plan_memory_compiles_no_more_than_it_replays(
    memory_fragments: int,
) -> None:
    desk = Desk(memory_bytes=memory_fragments * bytes_of_one(), ahead_tokens=8 * SIZE)
    desk.used_once(seed=1)
    request = make_request(40 * SIZE)
    desk.book.want(request)
    while request.num_computed_tokens < 40 * SIZE:
        desk.make_ready()
        run = cover_of(desk, request)
        assert isinstance(run, PlannedRun)
        request.num_computed_tokens += run.num_tokens
        cover_of(desk, request)
        desk.book.check_invariants()
    assert len(desk.compiler.asks) == 41


# --- what nobody uses any more


def test_what_a_request_leaves_behind_uncompiled_is_cancelled() -> None:
    desk, request, other = Desk(), make_request(3 * SIZE), make_request(SIZE)
    desk.book.want(request)
    desk.book.want(other)
    desk.book.release(request)
    assert desk.compiler.cancelled == [1, 2]
    desk.make_ready()
    assert {part.fragment_id for _, part in desk.ranks.sent} == {0}
    assert cover_of(desk, other) == PlannedRun((0,), SIZE)
    desk.book.check_invariants()


def test_what_was_cancelled_too_late_is_not_sent_and_can_be_wanted_again() -> None:
    desk, request = Desk(), make_request(SIZE)
    desk.book.want(request)
    desk.book.release(request)
    assert cover_of(desk, desk.planned(0)) == PlannedRun((1,), SIZE)
    assert {part.fragment_id for _, part in desk.ranks.sent} == {1}


def test_the_thread_skips_what_was_cancelled_before_its_turn() -> None:
    begun, go_on = Event(), Event()

    class HeldUpPlacement(ExpertPlacement):
        def physical_ids(
            self, topk_ids: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]
        ) -> npt.NDArray[np.int64]:
            begun.set()
            assert go_on.wait(10.0)
            return super().physical_ids(topk_ids, positions)

    experts = np.arange(SHAPE.num_experts, dtype=np.int32)
    compiler = CompilerThread(HeldUpPlacement(0, NUM_RANKS, SHAPE.num_experts, experts))
    for fragment_id in range(4):
        compiler.submit(fragment_id, make_routes(SIZE), Rank(0), 0)
    assert begun.wait(10.0)
    for fragment_id in (0, 1, 3):  # the first has been begun
        compiler.cancel(fragment_id)
    go_on.set()
    compiler.close()
    assert [fragment_id for fragment_id, _ in compiler.completed(0.0)] == [0, 2]


# --- how much is sent at once


def test_what_is_sent_between_two_steps_is_bounded_and_the_rest_goes_next() -> None:
    desk, request = Desk(max_pump_bytes=1), make_request(3 * SIZE)
    desk.book.want(request)
    desk.compiler.finish([0, 1, 2])
    sent = []
    for _ in range(4):
        desk.book.pump()
        sent.append(len(desk.ranks.sent) // NUM_RANKS)
        desk.book.check_invariants()
    assert sent == [1, 2, 3, 3]


def test_a_wait_sends_what_the_last_pump_left_without_waiting() -> None:
    desk, request = Desk(max_pump_bytes=1), make_request(2 * SIZE)
    desk.book.want(request)
    desk.compiler.finish([0, 1])
    desk.book.pump()
    desk.book.wait(1.0)
    assert len(desk.ranks.sent) == 2 * NUM_RANKS
    assert desk.compiler.timeouts == [0.0]


def test_what_was_left_unsent_for_a_request_that_ended_is_never_sent() -> None:
    desk, request = Desk(max_pump_bytes=1), make_request(2 * SIZE)
    desk.book.want(request)
    desk.compiler.finish([0, 1])
    desk.book.pump()
    desk.book.release(request)
    desk.book.pump()
    assert {part.fragment_id for _, part in desk.ranks.sent} == {0}
    desk.book.check_invariants()


# --- room in a step


def test_room_in_a_step_is_waited_for_only_so_long_at_one_place() -> None:
    desk = Desk()
    request = desk.planned(0, 2 * SIZE)
    fits = Unplanned("step_budget", wait=False, fits_later=True)
    desk.now = WAIT_SECONDS - 0.01
    assert cover_of(desk, request, SIZE - 1) == fits
    desk.now = WAIT_SECONDS
    assert cover_of(desk, request, SIZE - 1) == Unplanned("step_budget", wait=False)
    request.num_computed_tokens = SIZE
    assert cover_of(desk, request, SIZE - 1) == fits


@pytest.mark.parametrize(("wait_seconds", "is_cut"), [(60.0, False), (0.0, True)])
def test_beside_others_a_replay_is_cut_only_when_it_may_wait_no_longer(
    wait_seconds: float, is_cut: bool
) -> None:
    cell = make_planned_cell(num_kv_blocks=100, budget=12, wait_seconds=wait_seconds)
    prompts = [make_prompt(48, seed=seed) for seed in (5, 6)]
    for number, prompt in enumerate(prompts):
        cell.harness.generate(f"cold-{number}", prompt, 2)
    cell.harness.engine.evict("kv")
    for number, prompt in enumerate(prompts):
        cell.harness.submit(f"r{number}", prompt, 2)
    cell.harness.run()
    cut = read_metrics(cell.harness)("replay_fallbacks_total")["step_budget"]
    assert (cut > 0) == is_cut
    for number, prompt in enumerate(prompts):
        assert_undisturbed(cell.harness.generations[f"r{number}"], prompt, 2)
