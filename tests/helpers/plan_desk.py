"""A plan book over a compiler and ranks that the test plays itself."""

from collections.abc import Iterable

import numpy as np
from prometheus_client import CollectorRegistry

from cluster.dispatch_plan import PlanFragment
from cluster.errors import PlanError
from cluster.messages import SamplingParams, Submit
from cluster.metrics import Metrics
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes
from cluster.types import Namespace, Rank, SeqId
from cluster.worker_messages import HeldPlan, PlanPart, PlansHeld
from prefix_store.plan_compiler import compile_fragment
from router_service.features import Features
from router_service.plan_book import PlanBook, PlanLimits
from router_service.plans import PlannedRun, Unplanned
from router_service.request import Request
from router_service.step_metrics import StepMetrics
from tests.helpers.content_workers import SHAPE
from tests.helpers.engines import CLIENT

SIZE = 8
NUM_RANKS = 2
WAIT_SECONDS = 5.0
PLENTY = 1000
CONTIGUOUS = ExpertPlacement.contiguous(SHAPE.num_experts, NUM_RANKS)


class Compiler:
    """Completes what it is told to."""

    def __init__(self, placement: ExpertPlacement) -> None:
        self.placement = placement
        self._done: list[tuple[int, PlanFragment | PlanError]] = []
        self.cancelled: list[int] = []
        self.asks: dict[int, tuple[ExpertRoutes, Rank]] = {}
        self.first_positions: dict[int, int] = {}
        self.finished: set[int] = set()
        self.timeouts: list[float] = []

    @property
    def position_period(self) -> int:
        return self.placement.position_period

    def submit(
        self, fragment_id: int, routes: ExpertRoutes, source: Rank, first_position: int
    ) -> None:
        self.asks[fragment_id] = routes, source
        self.first_positions[fragment_id] = first_position

    def finish(self, fragment_ids: Iterable[int]) -> None:
        for fragment_id in fragment_ids:
            self.give(fragment_id, self.plan_of(fragment_id))

    def plan_of(self, fragment_id: int) -> PlanFragment:
        return compile_fragment(
            *self.asks[fragment_id],
            self.placement,
            first_position=self.first_positions[fragment_id],
        )

    def fail(self, fragment_id: int, why: str) -> None:
        self.finished.add(fragment_id)
        self._done.append((fragment_id, PlanError(why)))

    def give(self, fragment_id: int, plan: PlanFragment) -> None:
        """Whatever was asked for."""
        self.finished.add(fragment_id)
        self._done.append((fragment_id, plan))

    def cancel(self, fragment_id: int) -> None:
        self.cancelled.append(fragment_id)

    def completed(self, timeout_seconds: float) -> list[tuple[int, PlanFragment | PlanError]]:
        self.timeouts.append(timeout_seconds)
        done, self._done = self._done, []
        return done


class Ranks:
    """Acknowledge what they are told to."""

    def __init__(self) -> None:
        self._held: list[PlansHeld] = []
        self.sent: list[tuple[Rank, PlanPart]] = []
        self.timeouts: list[float] = []

    def send_plan(self, rank: Rank, part: PlanPart) -> None:
        self.sent.append((rank, part))

    def hold(self, rank: int, fragment_ids: Iterable[int], digest: bytes | None = None) -> None:
        """What was sent under these ids. digest: as if a part of another fragment had come."""
        sent = {part.fragment_id: part.digest for _, part in self.sent}
        held = [HeldPlan(n, digest or sent[n]) for n in fragment_ids if digest or n in sent]
        self._held.append(PlansHeld(rank, "", held))

    def plans_held(self, timeout_seconds: float) -> list[PlansHeld]:
        self.timeouts.append(timeout_seconds)
        held, self._held = self._held, []
        return held


class Desk:
    """One plan book and all it talks to. `now` is its clock."""

    def __init__(
        self,
        *,
        fragment_tokens: int = SIZE,
        memory_bytes: int = 2**20,
        placement: ExpertPlacement = CONTIGUOUS,
        min_run_tokens: int = 1,
        ahead_tokens: int = PLENTY,
        max_pump_bytes: int = 2**20,
    ) -> None:
        self.now = 0.0
        self.features = Features()
        self.compiler = Compiler(placement)
        self.ranks = Ranks()
        self.metrics = Metrics(CollectorRegistry())
        self.book = PlanBook(
            PlanLimits(
                NUM_RANKS,
                0,
                fragment_tokens,
                memory_bytes,
                WAIT_SECONDS,
                min_run_tokens=min_run_tokens,
                ahead_tokens=ahead_tokens,
                max_pump_bytes=max_pump_bytes,
            ),
            features=self.features,
            compiler=self.compiler,
            channel=self.ranks,
            observer=StepMetrics(self.metrics, "negotiated"),
            clock=lambda: self.now,
        )

    def make_ready(self) -> None:
        """Everything asked for is compiled, and what was sent is held by all ranks."""
        self.compiler.finish(set(self.compiler.asks) - self.compiler.finished)
        self.book.pump()
        self.hold_all()

    def hold_all(self) -> None:
        """What was sent is held by all ranks."""
        for rank in range(NUM_RANKS):
            self.ranks.hold(rank, self.compiler.asks)
        self.book.pump()

    def planned(self, seed: int, num_tokens: int = SIZE) -> Request:
        """A request whose fragments are ready."""
        request = make_request(num_tokens, seed)
        self.book.want(request)
        self.make_ready()
        return request

    def used_once(self, seed: int) -> None:
        self.book.release(self.planned(seed))

    @property
    def lookups(self) -> tuple[float, float]:
        """Hits and misses."""
        pair = self.metrics.plan_fragment_hits, self.metrics.plan_fragment_misses
        hits, misses = (counter.collect()[0].samples[0].value for counter in pair)
        return hits, misses


def make_routes(num_tokens: int, seed: int = 0) -> ExpertRoutes:
    rng = np.random.default_rng(seed)
    shape = num_tokens, SHAPE.num_moe_layers, 1
    ids = np.concatenate([rng.integers(0, 4, shape), rng.integers(4, 8, shape)], axis=2)
    return ExpertRoutes(ids.astype(np.uint8), rng.random(ids.shape).astype(np.float32))


def make_request(
    num_routed: int,
    seed: int = 0,
    *,
    num_computed: int = 0,
    rank: int = 0,
    namespace: str = "model",
) -> Request:
    """Its routes are a function of the seed; a longer one goes on where a shorter one ends."""
    prompt = np.zeros(num_routed + 4, np.int32)
    request = Request(
        Submit("r", prompt, SamplingParams(4, 0.0, 1.0, None, ()), None, False),
        client=CLIENT,
        seq_id=SeqId(0),
        seed=0,
        namespace=Namespace(namespace),
        block_size=4,
        route_shape=SHAPE,
        arrival_seconds=0.0,
    )
    request.home_rank = Rank(rank)
    request.num_computed_tokens = num_computed
    request.route_log.append(make_routes(PLENTY, seed).slice(0, num_routed))
    return request


def cover_of(desk: Desk, request: Request, limit: int = PLENTY) -> PlannedRun | Unplanned:
    return desk.book.cover(request, limit)
