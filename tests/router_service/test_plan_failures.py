"""Fragments that cannot be compiled, or whose parts differ from rank to rank: no step names them, all else goes on."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.dispatch_plan import PlanFragment
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes
from cluster.types import Rank
from prefix_store.compiler_thread import CompilerThread
from prefix_store.plan_compiler import compile_fragment
from router_service.plans import PlannedRun, Unplanned
from tests.helpers.content_engine import assert_undisturbed, make_prompt
from tests.helpers.plan_desk import (
    CONTIGUOUS,
    NUM_RANKS,
    SIZE,
    Desk,
    cover_of,
    make_request,
    make_routes,
)
from tests.helpers.planned_engine import PlannedCell, fallbacks, make_planned_cell

FAILED = Unplanned("plan_failed", wait=False, max_num_tokens=SIZE)
NOT_READY = Unplanned("plan_not_ready", wait=True)
"""What a rank's answer must not turn into a plan."""


def replay(cell: PlannedCell) -> None:
    """A prompt of 32 tokens, once its KV is gone."""
    prompt = make_prompt(32, seed=5)
    cell.harness.generate("cold", prompt, 4)
    cell.harness.engine.evict("kv")
    assert_undisturbed(cell.harness.generate("r", prompt, 4), prompt, 4)
    cell.check_invariants()


def test_a_fragment_that_cannot_be_compiled_is_done_without_and_the_next_one_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk, request = Desk(), make_request(2 * SIZE)
    desk.book.want(request)
    desk.compiler.fail(0, "no such expert")
    with caplog.at_level(logging.WARNING, logger="pointsman.plans"):
        desk.make_ready()
    assert [record.getMessage() for record in caplog.records] == [
        "plan_failed fragment=0 why='no such expert'"
    ]
    assert cover_of(desk, request) == FAILED
    request.num_computed_tokens = SIZE
    assert cover_of(desk, request) == PlannedRun((1,), SIZE)
    desk.book.check_invariants()
    desk.book.release(request)
    desk.book.check_invariants()
    assert desk.book.num_fragments == 1


def test_the_thread_goes_on_after_routes_of_which_no_plan_can_be_made() -> None:
    compiler = CompilerThread(CONTIGUOUS)
    routes = make_routes(SIZE)
    compiler.submit(0, ExpertRoutes(routes.topk_ids + 100, routes.topk_weights), Rank(0), 0)
    no_ids = routes.topk_ids.astype(np.float64)
    compiler.submit(1, ExpertRoutes(no_ids, routes.topk_weights), Rank(0), 0)
    compiler.submit(2, routes, Rank(0), 0)
    compiler.close()
    done = dict(compiler.completed(0.0))
    assert [isinstance(done[n], PlanFragment) for n in range(3)] == [False, False, True]
    assert str(done[0]).startswith(f"routes of {SIZE} tokens name expert 107")
    assert str(done[1]).startswith("IndexError: arrays used as indices")


def test_an_engine_replays_negotiated_what_its_compiler_could_not_plan() -> None:
    compiler = CompilerThread(ExpertPlacement.contiguous(4, 1))  # half of the experts
    cell = make_planned_cell(num_kv_blocks=64, budget=64, compiler=compiler)
    replay(cell)
    compiler.close()
    assert fallbacks(cell) == {"plan_failed": 32}
    assert cell.book.num_requests == cell.book.num_fragments == 0


def other_plan(position: int = 0) -> PlanFragment:
    return compile_fragment(make_routes(SIZE, seed=9), Rank(0), CONTIGUOUS, first_position=position)


def test_ranks_that_hold_parts_of_two_fragments_under_one_id_do_not_hold_a_plan() -> None:
    desk, request = Desk(), make_request(SIZE)
    desk.book.want(request)
    desk.compiler.finish([0])
    desk.book.pump()
    desk.ranks.hold(0, [0])
    desk.ranks.hold(1, [0], digest=other_plan().digest)
    desk.book.pump()
    assert cover_of(desk, request) == FAILED
    assert desk.book.num_bytes == 0
    assert desk.book.take_evicted() == [0]
    desk.ranks.hold(1, [0])
    desk.book.pump()
    assert cover_of(desk, request) == FAILED
    desk.book.check_invariants()
    desk.book.release(request)
    assert desk.book.num_fragments == 0


def test_who_wants_a_fragment_that_failed_gets_it_under_another_id() -> None:
    desk, request = Desk(), make_request(SIZE)
    desk.book.want(request)
    desk.compiler.finish([0])
    desk.book.pump()
    desk.ranks.hold(1, [0], digest=b"another")
    desk.book.pump()
    assert cover_of(desk, desk.planned(0)) == PlannedRun((1,), SIZE)
    assert cover_of(desk, request) == FAILED


def test_no_part_is_held_before_it_was_sent() -> None:
    desk, request = Desk(), make_request(SIZE)
    desk.book.want(request)
    digest = desk.compiler.plan_of(0).digest
    for rank in range(NUM_RANKS):
        desk.ranks.hold(rank, [0], digest=digest)
    desk.book.pump()
    desk.compiler.finish([0])
    desk.book.pump()
    assert cover_of(desk, request) == NOT_READY


def with_other_rows(plan: PlanFragment) -> PlanFragment:
    """Rank 1 expects one row less in the first layer than the source sends."""
    num_rows = plan.receive[1].num_rows.copy()
    num_rows[0] -= 1
    return replace(plan, receive=(plan.receive[0], replace(plan.receive[1], num_rows=num_rows)))


def with_other_destinations(plan: PlanFragment) -> PlanFragment:
    part = replace(plan.receive[1], destinations=plan.receive[1].destinations ^ np.uint8(1 << 7))
    return replace(plan, receive=(plan.receive[0], part))


@pytest.mark.parametrize(
    "spoil",
    [lambda plan: other_plan(), with_other_rows, with_other_destinations],
    ids=["another one", "other rows", "other destinations"],
)
def test_what_the_compiler_mixed_up_reaches_no_rank(spoil: Any) -> None:
    desk, request = Desk(), make_request(SIZE)
    desk.book.want(request)
    desk.compiler.give(0, spoil(desk.compiler.plan_of(0)))
    desk.book.pump()
    assert cover_of(desk, request) == FAILED
    assert desk.ranks.sent == []
    desk.book.check_invariants()


def test_a_cell_whose_ranks_hold_other_parts_answers_negotiated_and_counts_it() -> None:
    cell = make_planned_cell(2, num_kv_blocks=64, budget=64, mixed_up_rank=1)
    replay(cell)
    assert cell.workers.num_planned_tokens == 0
    assert fallbacks(cell) == {"plan_failed": 32}
