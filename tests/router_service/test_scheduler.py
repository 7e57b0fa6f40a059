"""The scheduler over a real store, without engine and workers: the test commits steps and makes up the routes."""

import numpy as np
from prometheus_client import CollectorRegistry

from cluster.logit_rules import NO_RULES, LogitRules
from cluster.messages import PromptSources, SamplingParams, Submit
from cluster.metrics import Metrics
from cluster.prefix_match import Publication
from cluster.routes import ExpertRoutes
from cluster.types import SeqId, StepId
from prefix_store.store import PrefixStore
from router_service.features import Features
from router_service.plans import NoPlans
from router_service.publisher import Publisher
from router_service.request import Request
from router_service.scheduler import Schedule, ScheduledChunk, Scheduler
from router_service.scheduler_limits import SchedulerLimits
from router_service.step_metrics import StepMetrics
from tests.helpers.content_workers import columns_of
from tests.prefix_store.builders import (
    BLOCK_SIZE,
    KV_BYTES_PER_BLOCK,
    NAMESPACE,
    SHAPE,
    TokenIds,
    branch,
    gates,
    route_block_bytes,
    tokens,
    write,
)

NEXT_TOKEN = 7


class FullStore(PrefixStore):
    """Its route budget has no room left for anything: every block stays private."""

    num_offers = 0

    def publish(self, *args: object) -> Publication:
        self.num_offers += 1
        block_ids = args[4]
        assert isinstance(block_ids, list)
        return Publication(("private",) * len(block_ids), conflict=False)


class Cell:
    """Scheduler, store and publisher. A step computes what is scheduled; routes arrive with it or later."""

    def __init__(
        self,
        *,
        num_ranks: int = 1,
        num_kv_blocks: int = 64,
        budget: int = 16,
        max_num_seqs: int = 8,
        route_replay: bool = True,
        store_class: type[PrefixStore] = PrefixStore,
    ) -> None:
        self.store = store_class(
            num_ranks=num_ranks,
            num_kv_blocks=num_kv_blocks,
            block_size=BLOCK_SIZE,
            route_shape=SHAPE,
            route_budget_bytes=4 * num_ranks * num_kv_blocks * route_block_bytes(),
            score_budget_bytes=0,
            kv_bytes_per_block=KV_BYTES_PER_BLOCK,
        )
        limits = SchedulerLimits(num_ranks, BLOCK_SIZE, budget, max_num_seqs, 100)
        self.features = Features(route_replay=route_replay)
        self.scheduler = Scheduler(limits, self.store, self.features, NoPlans())
        metrics = StepMetrics(Metrics(CollectorRegistry()), "local")
        self.publisher = Publisher(self.store, BLOCK_SIZE, self.features, metrics)
        self._num_steps = 0
        self._num_requests = 0
        self._late: list[tuple[StepId, ScheduledChunk]] = []

    def add(
        self, prompt: TokenIds, max_tokens: int = 8, *, rules: LogitRules = NO_RULES
    ) -> Request:
        sampling = SamplingParams(max_tokens, 0.0, 1.0, None, (), rules=rules)
        request = Request(
            Submit(f"r{self._num_requests}", prompt, sampling, None, False),
            client=b"http",
            seq_id=SeqId(self._num_requests),
            seed=0,
            namespace=NAMESPACE,
            block_size=BLOCK_SIZE,
            route_shape=SHAPE,
            arrival_seconds=0.0,
        )
        self._num_requests += 1
        self.scheduler.add(request)
        return request

    def step(self, *, routes_late: bool = False) -> Schedule:
        schedule = self.scheduler.schedule()
        step_id = StepId(self._num_steps)
        self._num_steps += 1
        self.publisher.expect(step_id, schedule.chunks)
        for chunk in schedule.chunks:
            chunk.request.num_computed_tokens += chunk.num_tokens
            if not chunk.replays:
                self._late.append((step_id, chunk))
            if chunk.samples:
                chunk.request.append_token(NEXT_TOKEN, columns_of([(-1.0, 1, NEXT_TOKEN, -1.0)]))
        if not routes_late:
            self.routes_arrive()
        for chunk in schedule.chunks:
            self.publisher.publish(chunk.request)
        return schedule

    def routes_arrive(self) -> None:
        for step_id, chunk in self._late:
            assert chunk.request.home_rank is not None
            self.publisher.record_routes(step_id, chunk.request.home_rank, _routes_of(chunk))
        self._late.clear()


def _routes_of(chunk: ScheduledChunk) -> ExpertRoutes:
    """What `gates` makes of these tokens, so that equal prefixes have equal routes."""
    end = chunk.first_position + chunk.num_tokens
    num_blocks = -(-end // BLOCK_SIZE)
    token_ids = np.concatenate([chunk.request.token_ids, np.zeros(BLOCK_SIZE, np.int32)])
    whole = gates(token_ids, 0, num_blocks)
    return whole.slice(chunk.first_position, end)


def preempt_the_youngest(cell: Cell, prompt: TokenIds) -> tuple[Request, Request]:
    """An older and a younger request on one rank, run until the younger had to give its blocks up."""
    older = cell.add(tokens(12, first=500), max_tokens=40)
    younger = cell.add(prompt, max_tokens=8)
    while younger not in cell.scheduler.waiting or not older.num_output_tokens:
        cell.step()
    return older, younger


GRAMMAR = LogitRules(grammar="any")


def computed(schedule: Schedule) -> list[Request]:
    return [chunk.request for chunk in schedule.chunks]


def test_who_awaits_a_grammar_lets_others_go_on_until_its_rank_has_it() -> None:
    cell = Cell()
    running = cell.add(tokens(8), max_tokens=50)
    cell.step()
    waits = cell.add(tokens(8, first=500), rules=GRAMMAR)
    schedule = cell.step()
    assert (schedule.admitted, computed(schedule)) == ([waits], [running])
    cell.scheduler.note_compiling({waits.seq_id})
    assert computed(cell.step()) == [running]
    cell.scheduler.note_compiling(set())
    assert computed(cell.step()) == [running, waits]


def test_who_awaits_a_grammar_goes_on_where_nobody_else_can() -> None:
    """At first it is alone; later the other one is preempted for want of blocks."""
    cell = Cell(num_kv_blocks=5)
    waits = cell.add(tokens(8), rules=GRAMMAR)
    assert computed(cell.step()) == [waits]
    other = cell.add(tokens(8, first=500))
    while other not in cell.scheduler.waiting or not other.num_output_tokens:
        last = computed(cell.step())
        assert last
    assert last == [waits]


def test_a_preempted_request_takes_no_kv_that_was_made_with_other_routes_since() -> None:
    cell = Cell(num_kv_blocks=8)
    prompt = tokens(12)
    older, younger = preempt_the_youngest(cell, prompt)
    mine = younger.route_log.slice(0, 12)
    cell.scheduler.remove(older)
    cell.store.evict("all")
    others = gates(tokens(12, first=900), 0, 3)
    cell.store.release(write(cell.store, prompt, routes=others).lease)
    schedule = cell.step()
    assert schedule.admitted == [younger]
    assert [(c.first_position, c.replays) for c in schedule.chunks] == [(0, True)]
    assert younger.route_log.slice(0, 12).same_ids(mine)


def test_a_preempted_request_takes_the_kv_that_its_own_routes_made() -> None:
    cell = Cell(num_kv_blocks=8)
    older, _ = preempt_the_youngest(cell, tokens(12))
    cell.scheduler.remove(older)
    cell.store.evict("all")
    cell.store.release(write(cell.store, tokens(8)).lease)
    (chunk,) = cell.step().chunks
    assert (chunk.first_position, chunk.replays) == (8, True)


def test_a_request_does_not_wait_for_blocks_that_the_store_refused_from_its_leader() -> None:
    cell = Cell(store_class=FullStore)
    leader = cell.add(tokens(8), max_tokens=50)
    cell.step()
    cell.step(routes_late=True)
    follower = cell.add(tokens(8), max_tokens=4)
    assert leader.num_pending_frames
    assert cell.step(routes_late=True).admitted == [follower]


def test_refused_blocks_are_offered_again_with_the_next_block_and_not_with_every_token() -> None:
    cell = Cell(store_class=FullStore)
    cell.add(tokens(8), max_tokens=50)
    for _ in range(1 + 4 * BLOCK_SIZE):
        cell.step()
    assert isinstance(cell.store, FullStore)
    assert cell.store.num_offers == 1 + 4


def test_a_request_waits_for_the_routes_of_a_leader_that_has_ended() -> None:
    cell = Cell()
    leader = cell.add(tokens(16))
    cell.step(routes_late=True)
    leader.finish_reason = "length"
    cell.scheduler.retire(leader)
    follower = cell.add(branch(16, 4))
    assert cell.step().chunks == []
    cell.routes_arrive()
    assert cell.step().admitted == [follower]
    assert follower.prompt_sources == PromptSources(16, 0)


def test_a_request_does_not_wait_for_what_an_ended_leader_will_not_compute() -> None:
    cell = Cell(budget=8)
    leader = cell.add(tokens(16))
    cell.step()
    leader.finish_reason = "stop"
    cell.scheduler.retire(leader)
    follower = cell.add(tokens(16))
    assert cell.step().admitted == [follower]


def test_without_replay_nobody_waits_for_routes_of_another_rank() -> None:
    waits = []
    for route_replay in (True, False):
        cell = Cell(num_ranks=2, max_num_seqs=1, budget=8, route_replay=route_replay)
        cell.add(tokens(40))
        cell.step()
        follower = cell.add(tokens(40))
        waits.append(follower not in cell.step().admitted)
    assert waits == [True, False]


def test_a_request_goes_to_another_rank_when_the_best_one_has_too_few_blocks() -> None:
    cell = Cell(num_ranks=2, num_kv_blocks=12)
    hot = cell.add(tokens(24), max_tokens=20)
    while hot.num_output_tokens < 12:
        cell.step()
    follower = cell.add(branch(24, 14))
    assert cell.step().admitted == [follower]
    assert follower.home_rank != hot.home_rank
    assert follower.prompt_sources == PromptSources(0, 24)


def test_nobody_overtakes_the_first_in_line_to_blocks_that_it_waits_for() -> None:
    cell = Cell(num_kv_blocks=8)
    running = cell.add(tokens(20), max_tokens=8)
    for _ in range(3):
        cell.step()
    first = cell.add(tokens(24, first=300), max_tokens=4)
    small = cell.add(tokens(2, first=600), max_tokens=2)
    assert cell.step().admitted == []
    assert list(cell.scheduler.waiting) == [first, small]
    cell.scheduler.remove(running)
    assert cell.step().admitted[0] is first


def test_the_oldest_goes_on_when_all_its_rank_has_is_its_own() -> None:
    cell = Cell(num_kv_blocks=8, budget=64)
    for _ in range(2):
        request = cell.add(tokens(16), max_tokens=16)
        for _ in range(60):
            if request.num_output_tokens < 16:
                cell.step()
        assert request.num_output_tokens == 16
        cell.scheduler.remove(request)
    assert cell.scheduler.num_preemptions > 0
    cell.store.check_invariants()
