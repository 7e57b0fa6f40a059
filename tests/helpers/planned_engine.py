"""An engine over content workers whose replays travel planned, with fragments compiled and acknowledged late, in an
order drawn from a seed.

Content workers have no experts that rows could travel to: they look up the routes that a fragment was compiled from.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from cluster.dispatch_plan import PlanFragment
from cluster.errors import PlanError
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes
from cluster.types import Rank
from cluster.worker_messages import (
    HeldPlan,
    PlanPart,
    PlansHeld,
    RouteChunk,
    StepDescriptor,
    StepResult,
)
from prefix_store.plan_compiler import compile_fragment
from router_service.fragment_pool import PlanCompiler
from router_service.plan_book import PlanBook, PlanLimits
from tests.helpers.content_engine import read_metrics
from tests.helpers.content_workers import SHAPE, ContentWorkers
from tests.helpers.engines import EngineHarness, Planning

FIRST_ROUTE_ID = 10**6
"""Of the route chunks that stand for fragments; the engine's own ids are smaller."""
A = TypeVar("A")


class Delays(Generic[A]):
    """Things that come out some looks after they were put in; a look that may wait skips to the first one."""

    def __init__(self, rng: random.Random, max_looks: int) -> None:
        self._rng = rng
        self._max_looks = max_looks
        self._num_looks = 0
        self._items: list[tuple[int, A]] = []

    def put(self, item: A) -> None:
        self._items.append((self._num_looks + self._rng.randint(0, self._max_looks), item))

    def drop(self, is_meant: Callable[[A], bool]) -> None:
        self._items = [(due, item) for due, item in self._items if not is_meant(item)]

    def take(self, *, wait: bool) -> list[A]:
        self._num_looks += 1
        if wait and self._items:
            self._num_looks = max(self._num_looks, min(due for due, _ in self._items))
        ready = [item for due, item in self._items if due <= self._num_looks]
        self._items = [(due, item) for due, item in self._items if due > self._num_looks]
        return ready


class RecordingCompiler:
    """Implements PlanCompiler in this thread and remembers every ask."""

    def __init__(
        self, placement: ExpertPlacement, delays: Delays[tuple[int, PlanFragment | PlanError]]
    ) -> None:
        self._placement = placement
        self._delays = delays
        self.routes: dict[int, ExpertRoutes] = {}
        self.sources: dict[int, Rank] = {}
        self.first_positions: dict[int, int] = {}

    @property
    def position_period(self) -> int:
        return self._placement.position_period

    def submit(
        self, fragment_id: int, routes: ExpertRoutes, source: Rank, first_position: int
    ) -> None:
        assert fragment_id not in self.routes, "an id is given once"
        self.routes[fragment_id], self.sources[fragment_id] = routes, source
        self.first_positions[fragment_id] = first_position
        plan = compile_fragment(routes, source, self._placement, first_position=first_position)
        self._delays.put((fragment_id, plan))

    def cancel(self, fragment_id: int) -> None:
        """Too late: it is completed all the same."""

    def completed(self, timeout_seconds: float) -> list[tuple[int, PlanFragment | PlanError]]:
        return self._delays.take(wait=timeout_seconds > 0)


class AcknowledgingRanks:
    """Implements PlanChannel: every rank acknowledges each fragment by itself, late."""

    def __init__(
        self, delays: Delays[tuple[Rank, HeldPlan]], mixed_up_rank: int | None = None
    ) -> None:
        self._delays = delays
        self._mixed_up_rank = mixed_up_rank
        self.held: set[tuple[Rank, int]] = set()
        """Acknowledged and not dropped since."""

    def send_plan(self, rank: Rank, part: PlanPart) -> None:
        digest = b"of another" if rank == self._mixed_up_rank else part.digest
        self._delays.put((rank, HeldPlan(part.fragment_id, digest)))

    def lose(self, rank: Rank) -> None:
        """Its process is gone, with what it holds and what it was about to say."""
        self.held = {(holder, fragment_id) for holder, fragment_id in self.held if holder != rank}
        self._delays.drop(lambda item: item[0] == rank)

    def plans_held(self, timeout_seconds: float) -> list[PlansHeld]:
        held = self._delays.take(wait=timeout_seconds > 0)
        self.held.update((rank, plan.fragment_id) for rank, plan in held)
        return [PlansHeld(rank, "", [plan]) for rank, plan in held]


class FragmentReadingWorkers(ContentWorkers):
    """A step may name only fragments that every rank holds and nobody dropped, at positions they were compiled for."""

    def __init__(
        self,
        num_ranks: int,
        block_size: int,
        compiler: RecordingCompiler,
        ranks: AcknowledgingRanks,
    ) -> None:
        super().__init__(num_ranks, block_size)
        self._compiler = compiler
        self._ranks = ranks
        self.num_planned_tokens = 0
        self.num_evicted_fragments = 0
        self._dropped: set[int] = set()

    def execute(self, step: StepDescriptor) -> list[StepResult]:
        self._evict(step.evicted_fragment_ids.tolist())
        route_ids = step.route_ids.copy()
        starts = np.concatenate([[0], np.cumsum(step.fragment_lens)])
        for chunk in np.flatnonzero(step.fragment_lens).tolist():
            assert route_ids[chunk] == -1, "a chunk travels by a plan or by its routes"
            rank, route_id = Rank(int(step.ranks[chunk])), FIRST_ROUTE_ID + chunk
            fragment_ids = step.fragment_ids[starts[chunk] : starts[chunk + 1]].tolist()
            routes = self._routes_of(rank, fragment_ids, int(step.first_positions[chunk]))
            assert routes.num_tokens == step.num_tokens[chunk], "the fragments cover the chunk"
            self.num_planned_tokens += routes.num_tokens
            route_ids[chunk] = route_id
            self.send_routes(
                rank, RouteChunk(route_id, step.step_id, routes.topk_ids, routes.topk_weights)
            )
        return super().execute(msgspec.structs.replace(step, route_ids=route_ids))

    def _evict(self, fragment_ids: list[int]) -> None:
        for fragment_id in fragment_ids:
            assert fragment_id not in self._dropped
            self._dropped.add(fragment_id)
            for rank in range(self.num_ranks):
                self._ranks.held.discard((Rank(rank), fragment_id))
            self.num_evicted_fragments += 1

    def lose_rank(self, rank: int, num_frames: int) -> None:
        super().lose_rank(rank, num_frames)
        self._ranks.lose(Rank(rank))

    def _routes_of(self, rank: Rank, fragment_ids: list[int], position: int) -> ExpertRoutes:
        for fragment_id in fragment_ids:
            missing = [r for r in range(self.num_ranks) if (r, fragment_id) not in self._ranks.held]
            assert not missing, f"ranks {missing} do not hold fragment {fragment_id}"
            assert self._compiler.sources[fragment_id] == rank
            asked = self._compiler.first_positions[fragment_id]
            assert (position - asked) % self._compiler.position_period == 0
            position += self._compiler.routes[fragment_id].num_tokens
        return ExpertRoutes.concatenate([self._compiler.routes[f] for f in fragment_ids], SHAPE)


@dataclass(frozen=True)
class PlannedCell:
    """An engine over content workers, and its parts."""

    harness: EngineHarness
    workers: FragmentReadingWorkers

    @property
    def book(self) -> PlanBook:
        assert isinstance(self.harness.plans, PlanBook)
        return self.harness.plans

    def check_invariants(self) -> None:
        self.harness.store.check_invariants()
        self.book.check_invariants()


def make_planned_cell(
    num_ranks: int = 1,
    block_size: int = 4,
    *,
    rng: random.Random | None = None,
    max_looks: int = 0,
    fragment_tokens: int = 8,
    memory_bytes: int = 2**20,
    wait_seconds: float = 60.0,
    min_run_tokens: int = 1,
    ahead_tokens: int = 10**6,
    max_pump_bytes: int = 2**20,
    mixed_up_rank: int | None = None,
    compiler: PlanCompiler | None = None,
    num_copies: int = 1,
    **options: Any,
) -> PlannedCell:
    """max_looks: how late a fragment is compiled, and acknowledged by each rank. compiler: in place of the own one.

    num_copies: of every expert. mixed_up_rank: gets parts of other fragments under the ids of these.
    """
    rng = rng or random.Random(0)
    experts = np.arange(SHAPE.num_experts, dtype=np.int32)
    placement = ExpertPlacement(0, num_ranks, SHAPE.num_experts, np.tile(experts, num_copies))
    recording = RecordingCompiler(placement, Delays(rng, max_looks))
    ranks = AcknowledgingRanks(Delays(rng, max_looks), mixed_up_rank)
    workers = FragmentReadingWorkers(num_ranks, block_size, recording, ranks)
    limits = PlanLimits(
        num_ranks,
        placement.epoch,
        fragment_tokens,
        memory_bytes,
        wait_seconds,
        min_run_tokens=min_run_tokens,
        ahead_tokens=ahead_tokens,
        max_pump_bytes=max_pump_bytes,
    )
    harness = EngineHarness(
        workers,
        SHAPE,
        num_ranks=num_ranks,
        block_size=block_size,
        planned=Planning(limits, compiler or recording, ranks),
        **options,
    )
    return PlannedCell(harness, workers)


def fallbacks(cell: PlannedCell) -> dict[str, float]:
    """Tokens by reason, of the reasons that occurred."""
    by_reason = read_metrics(cell.harness)("replay_fallbacks_total")
    return {reason: value for reason, value in by_reason.items() if value}


def num_planning_requests(cell: PlannedCell) -> int:
    cell.check_invariants()
    return cell.book.num_requests
