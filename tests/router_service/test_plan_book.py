"""The plan book over a compiler and ranks that the test plays itself: what is wanted, what is held, what a run is."""

import numpy as np
import pytest

from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes
from prefix_store.plan_compiler import compile_fragment
from router_service.plans import PlannedRun, Unplanned
from router_service.request import Request
from tests.helpers.content_workers import SHAPE
from tests.helpers.plan_desk import (
    CONTIGUOUS,
    NUM_RANKS,
    PLENTY,
    SIZE,
    WAIT_SECONDS,
    Desk,
    cover_of,
    make_request,
    make_routes,
)

# --- fragments and their borders


@pytest.mark.parametrize(
    ("num_computed", "num_routed", "lengths"),
    [
        (0, 24, [8, 8, 8]),
        (0, 20, [8, 8, 4]),
        (4, 20, [4, 8, 4]),
        (12, 13, [1]),
        (8, 16, [8]),
        (16, 16, []),
    ],
)
def test_fragments_end_at_borders_and_where_the_routes_do(
    num_computed: int, num_routed: int, lengths: list[int]
) -> None:
    desk = Desk()
    desk.book.want(make_request(num_routed, num_computed=num_computed))
    asked = [routes for routes, _ in desk.compiler.asks.values()]
    assert [routes.num_tokens for routes in asked] == lengths
    whole = make_routes(PLENTY).slice(num_computed, num_routed)
    assert b"".join(r.topk_ids.tobytes() for r in asked) == whole.topk_ids.tobytes()


TWO_COPIES = ExpertPlacement(
    0, NUM_RANKS, SHAPE.num_experts, np.tile(np.arange(SHAPE.num_experts, dtype=np.int32), 2)
)


@pytest.mark.parametrize(
    ("placement", "first_positions"), [(CONTIGUOUS, [0]), (TWO_COPIES, [0, 1])]
)
def test_the_same_routes_elsewhere_are_another_fragment_only_where_copies_take_turns(
    placement: ExpertPlacement, first_positions: list[int]
) -> None:
    desk, request = Desk(fragment_tokens=1, placement=placement), make_request(0)
    request.route_log.append(ExpertRoutes.concatenate([make_routes(1)] * 4, SHAPE))
    desk.book.want(request)
    assert list(desk.compiler.first_positions.values()) == first_positions
    assert desk.lookups == (4 - len(first_positions), len(first_positions))


def test_every_rank_gets_its_own_part_and_only_the_source_the_sending_one() -> None:
    desk = Desk()
    desk.book.want(make_request(SIZE, rank=1))
    desk.make_ready()
    assert [rank for rank, _ in desk.ranks.sent] == [0, 1]
    assert [part.send is None for _, part in desk.ranks.sent] == [True, False]
    plan = compile_fragment(*desk.compiler.asks[0], CONTIGUOUS, first_position=0)
    for rank, part in desk.ranks.sent:
        assert part.receive.pair_rows.tobytes() == plan.receive[rank].pair_rows.tobytes()


def test_requests_with_the_same_routes_share_fragments_and_both_are_counted() -> None:
    desk = Desk()
    desk.book.want(make_request(16))
    desk.book.want(make_request(20))
    assert len(desk.compiler.asks) == 3
    assert desk.lookups == (2, 3)


@pytest.mark.parametrize(
    "other",
    [
        make_request(SIZE, seed=1),
        make_request(SIZE, rank=1),
        make_request(SIZE - 1),
        make_request(SIZE, namespace="of another tenant"),
    ],
    ids=["other routes", "another source", "fewer tokens", "another namespace"],
)
def test_what_differs_is_another_fragment(other: Request) -> None:
    desk = Desk()
    desk.book.want(make_request(SIZE))
    desk.book.want(other)
    assert desk.lookups == (0, 2)


def test_the_same_ids_with_other_weights_are_another_fragment() -> None:
    desk, other = Desk(), make_request(0)
    routes = make_request(SIZE).route_log.slice(0, SIZE)
    weights = routes.topk_weights.copy()
    weights[-1, -1, -1] = np.nextafter(weights[-1, -1, -1], np.float32(2))
    other.route_log.append(ExpertRoutes(routes.topk_ids, weights))
    desk.book.want(make_request(SIZE))
    desk.book.want(other)
    assert len(desk.compiler.asks) == 2


# --- from wanted to held


def test_a_request_waits_until_its_plan_is_held_by_every_rank() -> None:
    desk, request = Desk(), make_request(SIZE)
    desk.book.want(request)
    waiting = Unplanned("plan_not_ready", wait=True)
    seen = [cover_of(desk, request)]
    desk.compiler.finish([0])
    desk.book.pump()
    seen.append(cover_of(desk, request))
    desk.ranks.hold(1, [0])
    desk.book.pump()
    seen.append(cover_of(desk, request))
    desk.ranks.hold(1, [0])  # twice by one rank is not once by both
    desk.book.pump()
    seen.append(cover_of(desk, request))
    assert seen == [waiting] * 4
    desk.ranks.hold(0, [0])
    desk.book.pump()
    assert cover_of(desk, request) == PlannedRun((0,), SIZE)


def test_a_request_waits_no_longer_than_it_may() -> None:
    desk, request = Desk(), make_request(SIZE)
    desk.book.want(request)
    desk.now = WAIT_SECONDS - 0.01
    before = cover_of(desk, request)
    desk.now = WAIT_SECONDS
    assert (before, cover_of(desk, request)) == (
        Unplanned("plan_not_ready", wait=True),
        Unplanned("plan_not_ready", wait=False),
    )


def test_a_run_ends_before_the_first_fragment_that_is_not_held() -> None:
    desk, request = Desk(), make_request(3 * SIZE)
    desk.book.want(request)
    desk.compiler.finish([0, 1, 2])
    desk.book.pump()
    for rank in range(NUM_RANKS):
        desk.ranks.hold(rank, [0, 2])
    desk.book.pump()
    assert cover_of(desk, request) == PlannedRun((0,), SIZE)


@pytest.mark.parametrize(
    ("limit", "run"),
    [(8, PlannedRun((0,), 8)), (15, PlannedRun((0,), 8)), (16, PlannedRun((0, 1), 16))],
)
def test_a_run_is_whole_fragments_under_the_limit(limit: int, run: PlannedRun) -> None:
    desk = Desk()
    request = desk.planned(0, 3 * SIZE)
    assert cover_of(desk, request, limit) == run


def test_a_fragment_over_the_limit_is_not_waited_for() -> None:
    desk, request = Desk(), make_request(SIZE)
    desk.book.want(request)
    answer = Unplanned("step_budget", wait=False, fits_later=True)
    assert cover_of(desk, request, SIZE - 1) == answer


def test_between_borders_a_request_replays_negotiated_up_to_the_next_one() -> None:
    desk = Desk()
    request = desk.planned(0, 2 * SIZE)
    request.num_computed_tokens = 3
    assert cover_of(desk, request) == Unplanned("no_border", wait=False, max_num_tokens=SIZE - 3)
    request.num_computed_tokens = SIZE
    assert cover_of(desk, request) == PlannedRun((1,), SIZE)


def test_a_step_budget_under_a_block_plans_nothing_and_says_so() -> None:
    desk, request = Desk(fragment_tokens=0), make_request(SIZE)
    desk.book.want(request)
    assert desk.compiler.asks == {}
    assert cover_of(desk, request) == Unplanned("step_budget", wait=False)


def test_switched_off_a_request_goes_on_negotiated_and_switched_on_again_planned() -> None:
    desk = Desk()
    request = desk.planned(0)
    desk.features.planned_dispatch = False
    off = cover_of(desk, request)
    desk.features.planned_dispatch = True
    assert (off, cover_of(desk, request)) == (
        Unplanned("planned_off", wait=False),
        PlannedRun((0,), SIZE),
    )


def test_switched_off_nothing_is_compiled() -> None:
    desk = Desk()
    desk.features.planned_dispatch = False
    desk.book.want(make_request(SIZE))
    assert desk.compiler.asks == {}


def test_between_steps_nobody_waits_and_in_the_wait_the_one_who_is_due() -> None:
    desk, request = Desk(), make_request(SIZE)
    desk.book.want(request)
    desk.book.pump()
    desk.book.wait(0.5)
    desk.compiler.finish([0])
    desk.book.pump()
    desk.book.wait(0.25)
    assert desk.compiler.timeouts == [0.0, 0.5, 0.0]
    assert desk.ranks.timeouts == [0.0, 0.0, 0.25]


def test_a_wait_sends_what_was_compiled_and_takes_what_is_held() -> None:
    desk, request = Desk(), make_request(SIZE)
    desk.book.want(request)
    desk.compiler.finish([0])
    desk.book.wait(1.0)
    assert len(desk.ranks.sent) == NUM_RANKS
    for rank in range(NUM_RANKS):
        desk.ranks.hold(rank, [0])
    desk.book.wait(1.0)
    assert cover_of(desk, request) == PlannedRun((0,), SIZE)
