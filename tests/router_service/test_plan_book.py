"""The plan book over a compiler and ranks that the test plays itself; then under an engine over content workers."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from cluster.config import Config, SchedulerSection
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes
from cluster.worker_messages import CellIdentity
from prefix_store.plan_compiler import compile_fragment
from router_service.plan_limits import plan_limits
from router_service.plans import PlannedRun, Unplanned
from router_service.request import Request
from tests.helpers.content_engine import assert_undisturbed, make_prompt, read_metrics
from tests.helpers.content_workers import SHAPE
from tests.helpers.engines import CLIENT
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
from tests.helpers.planned_engine import PlannedCell, make_planned_cell


def make_identity(block_size: int) -> CellIdentity:
    return CellIdentity(
        model_fingerprint="digests",
        dtype="float32",
        deterministic=True,
        ep_size=NUM_RANKS,
        placement_epoch=0,
        dispatch="negotiated",
        block_size=block_size,
        num_kv_blocks=64,
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


# --- eviction


def bytes_of_one() -> int:
    desk = Desk()
    desk.planned(0)
    return desk.book.num_bytes


def test_fragments_in_use_are_not_evicted_and_what_finds_no_room_is_not_sent() -> None:
    desk = Desk(memory_bytes=2 * bytes_of_one())
    first = desk.planned(0, 2 * SIZE)
    second = desk.planned(1, 2 * SIZE)
    assert desk.book.take_evicted() == []
    assert cover_of(desk, first) == PlannedRun((0, 1), 2 * SIZE)
    assert cover_of(desk, second) == Unplanned("plan_memory", wait=False, max_num_tokens=SIZE)
    assert {part.fragment_id for _, part in desk.ranks.sent} == {0, 1}
    desk.book.check_invariants()
    desk.book.release(second)
    desk.book.check_invariants()
    assert desk.book.num_fragments == 2


def test_once_there_is_room_what_was_refused_is_compiled_anew() -> None:
    desk = Desk(memory_bytes=bytes_of_one())
    first, second = make_request(SIZE), make_request(SIZE, seed=1)
    desk.book.want(first)
    desk.book.want(second)
    desk.make_ready()
    refused = Unplanned("plan_memory", wait=False, max_num_tokens=SIZE)
    assert cover_of(desk, second) == refused
    desk.book.release(first)
    third = desk.planned(1)
    assert cover_of(desk, third) == PlannedRun((2,), SIZE)
    assert desk.book.take_evicted() == [0]
    assert cover_of(desk, second) == refused
    desk.book.check_invariants()


def test_the_least_recently_used_go_first_and_only_for_others() -> None:
    desk = Desk(memory_bytes=int(2.9 * bytes_of_one()))
    desk.used_once(seed=0)
    desk.used_once(seed=1)
    desk.used_once(seed=0)
    assert desk.book.take_evicted() == []
    desk.used_once(seed=2)
    assert desk.book.take_evicted() == [1]
    assert desk.book.num_fragments == 2


def test_evicted_ids_are_told_once() -> None:
    desk = Desk(memory_bytes=bytes_of_one())
    desk.used_once(seed=0)
    desk.used_once(seed=1)
    assert [desk.book.take_evicted(), desk.book.take_evicted()] == [[0], []]


def test_a_fragment_wanted_after_its_eviction_gets_another_id() -> None:
    desk = Desk(memory_bytes=bytes_of_one())
    desk.used_once(seed=0)
    desk.used_once(seed=1)
    request = desk.planned(seed=0)
    assert cover_of(desk, request) == PlannedRun((2,), SIZE)
    assert desk.lookups == (0, 3)


def test_an_acknowledgement_of_an_evicted_fragment_changes_nothing() -> None:
    desk = Desk(memory_bytes=bytes_of_one())
    desk.used_once(seed=0)
    desk.used_once(seed=1)
    desk.ranks.hold(0, [0])
    desk.book.pump()
    assert desk.book.num_fragments == 1


def test_what_ranks_have_not_acknowledged_is_not_evicted_yet() -> None:
    desk, request = Desk(memory_bytes=bytes_of_one()), make_request(SIZE)
    desk.book.want(request)
    desk.compiler.finish([0])
    desk.book.pump()
    desk.book.release(request)
    desk.ranks.hold(0, [0])
    desk.book.pump()
    other = make_request(SIZE, seed=1)
    desk.book.want(other)
    desk.compiler.finish([1])
    desk.book.pump()
    assert desk.book.take_evicted() == []
    assert cover_of(desk, other) == Unplanned("plan_memory", wait=False, max_num_tokens=SIZE)
    desk.ranks.hold(1, [0])
    desk.book.pump()
    desk.used_once(seed=2)
    assert desk.book.take_evicted() == [0]


def test_a_release_twice_is_one() -> None:
    desk = Desk(memory_bytes=bytes_of_one())
    first, second = desk.planned(0), desk.planned(0)
    desk.book.release(first)
    desk.book.release(first)
    desk.planned(1)
    desk.book.check_invariants()
    assert cover_of(desk, second) == PlannedRun((0,), SIZE)


def test_a_request_that_wants_twice_uses_its_fragments_once() -> None:
    desk = Desk(memory_bytes=bytes_of_one())
    request = desk.planned(0)
    desk.book.want(request)
    desk.book.release(request)
    desk.used_once(seed=1)
    desk.book.check_invariants()
    assert desk.book.take_evicted() == [0]


# --- under an engine


def make_replay(num_tokens: int = 32, **options: Any) -> tuple[PlannedCell, list[int]]:
    """An engine that has computed a prompt and lost its KV."""
    cell = make_planned_cell(**({"num_kv_blocks": 64, "budget": 64} | options))
    prompt = make_prompt(num_tokens, seed=5)
    cell.harness.generate("cold", prompt, 4)
    cell.harness.engine.evict("kv")
    return cell, prompt


def replay_ways(cell: PlannedCell) -> dict[str, float]:
    return read_metrics(cell.harness)("replayed_tokens_total")


def fallbacks(cell: PlannedCell) -> dict[str, float]:
    """Tokens by reason, of the reasons that occurred."""
    by_reason = read_metrics(cell.harness)("replay_fallbacks_total")
    return {reason: value for reason, value in by_reason.items() if value}


def step_until_planned(cell: PlannedCell) -> None:
    for _ in range(20):
        if cell.workers.num_planned_tokens:
            return
        cell.harness.step()
    raise AssertionError("nothing travelled planned in 20 steps")


def num_planning_requests(cell: PlannedCell) -> int:
    cell.check_invariants()
    return cell.book.num_requests


def test_a_replay_travels_planned_and_answers_like_the_first_time() -> None:
    cell, prompt = make_replay()
    assert_undisturbed(cell.harness.generate("r", prompt, 4), prompt, 4)
    assert replay_ways(cell) == {"planned": 32, "negotiated": 0}
    assert fallbacks(cell) == {}


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


@pytest.mark.parametrize(
    ("budget", "fragment_tokens"),
    [(2048, 128), (512, 128), (256, 128), (255, 112), (128, 64), (40, 16), (16, 16), (15, 0)],
)
def test_two_fragments_fit_a_step_budget_and_at_least_one(
    budget: int, fragment_tokens: int
) -> None:
    config = Config(scheduler=SchedulerSection(max_num_batched_tokens=budget))
    assert plan_limits(config, make_identity(block_size=16)).fragment_tokens == fragment_tokens


@pytest.mark.parametrize(("budget", "ahead_tokens"), [(2048, 8192), (15, 60)])
def test_two_blocks_are_worth_a_plan_and_four_steps_are_asked_for_ahead(
    budget: int, ahead_tokens: int
) -> None:
    config = Config(scheduler=SchedulerSection(max_num_batched_tokens=budget))
    limits = plan_limits(config, make_identity(block_size=16))
    assert (limits.min_run_tokens, limits.ahead_tokens) == (32, ahead_tokens)


def test_switched_off_in_the_middle_of_a_replay_the_rest_goes_negotiated() -> None:
    cell, prompt = make_replay(budget=8)
    cell.harness.submit("r", prompt, 4)
    step_until_planned(cell)
    cell.harness.features.planned_dispatch = False
    cell.harness.run()
    assert_undisturbed(cell.harness.generations["r"], prompt, 4)
    assert fallbacks(cell) == {"planned_off": 24}
    assert num_planning_requests(cell) == 0


def serve_traffic(cell: PlannedCell, rng: random.Random) -> dict[str, tuple[list[int], int]]:
    """Shared prefixes, aborts, evictions, the switch turned; what was not aborted."""
    stems = [make_prompt(rng.randrange(8, 40), seed=100 + number) for number in range(3)]
    alive: dict[str, tuple[list[int], int]] = {}
    for number in range(50):
        stem = rng.choice(stems)
        prompt = [*stem[: rng.randrange(1, len(stem) + 1)], *make_prompt(rng.randrange(9), number)]
        alive[f"r{number}"] = prompt, rng.randrange(1, 16)
        cell.harness.submit(f"r{number}", *alive[f"r{number}"])
        for _ in range(rng.randrange(0, 5)):
            if cell.harness.engine.has_work:
                cell.harness.step()
        victim = rng.choice(list(alive))
        if rng.random() < 0.15 and cell.harness.generations[victim].completion is None:
            cell.harness.engine.abort(CLIENT, victim)
            del alive[victim]
        if rng.random() < 0.25:
            cell.harness.engine.evict(rng.choice(["kv", "kv", "routes", "all"]))
        cell.harness.features.planned_dispatch = rng.random() < 0.9
        cell.check_invariants()
    cell.harness.run()
    return alive


TRAFFIC: dict[str, dict[str, Any]] = {
    "plenty": {},
    "tiny_plan_budget": {"memory_bytes": 1},
    "small_plan_budget": {"memory_bytes": 4000},
    "late": {"max_looks": 6},
    "three_copies_of_every_expert": {"max_looks": 2, "num_copies": 3},
    "late_and_impatient": {"max_looks": 6, "wait_seconds": 0.0},
    "small_steps": {"budget": 9, "max_looks": 3, "memory_bytes": 2000},
    "near_window": {"ahead_tokens": 8, "max_looks": 3, "memory_bytes": 4000},
    "short_runs": {"min_run_tokens": 8, "max_looks": 2},
    "small_pumps": {"max_pump_bytes": 1, "ahead_tokens": 16, "max_looks": 2},
    "few_blocks": {"num_kv_blocks": 16, "max_looks": 3, "memory_bytes": 1},
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", TRAFFIC.values(), ids=TRAFFIC)
def test_random_traffic_stays_undisturbed_and_leaves_no_fragment_in_use(
    options: dict[str, Any], seed: int
) -> None:
    rng = random.Random(seed)
    num_ranks = rng.choice([1, 2, 4])
    cell = make_planned_cell(
        num_ranks, rng=rng, **({"num_kv_blocks": 40, "budget": 32, "max_num_seqs": 4} | options)
    )
    for request_id, (prompt, max_tokens) in serve_traffic(cell, rng).items():
        assert_undisturbed(cell.harness.generations[request_id], prompt, max_tokens)
    assert num_planning_requests(cell) == 0


def test_random_traffic_reaches_what_it_is_for() -> None:
    seen: Counter[str] = Counter()
    for options in TRAFFIC.values():
        rng = random.Random(1)
        defaults = {"num_kv_blocks": 40, "budget": 32, "max_num_seqs": 4}
        cell = make_planned_cell(2, rng=rng, **(defaults | options))
        serve_traffic(cell, rng)
        seen += Counter(fallbacks(cell))
        seen += Counter(
            planned=cell.workers.num_planned_tokens,
            evicted=cell.workers.num_evicted_fragments,
            preempted=cell.harness.scheduler.num_preemptions,
            shared=int(read_metrics(cell.harness)("plan_fragment_hits_total")[""]),
        )
    assert set(seen) >= {
        *("planned_off", "too_short", "plan_not_ready", "plan_memory"),
        *("step_budget", "no_border"),
        *("planned", "evicted", "preempted", "shared"),
    }
