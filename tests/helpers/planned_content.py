"""Plans for content workers: a fragment stands for the routes that it was compiled from."""

from dataclasses import dataclass, field

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
from router_service.plan_book import PlanLimits
from tests.helpers.content_workers import SHAPE, ContentWorkers
from tests.helpers.engines import EngineHarness, Planning


@dataclass
class Fragments:
    """The engine's compiler, in its own thread, and its channel to ranks that acknowledge at once.

    delay: a fragment is compiled only so many looks later.
    """

    num_ranks: int
    delay: int = 0
    routes: dict[int, ExpertRoutes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._placement = ExpertPlacement.contiguous(SHAPE.num_experts, self.num_ranks)
        self._asks: list[tuple[int, int, PlanFragment]] = []
        self._looks = 0
        self._held: list[PlansHeld] = []

    @property
    def position_period(self) -> int:
        return self._placement.position_period

    def submit(
        self, fragment_id: int, routes: ExpertRoutes, source: Rank, first_position: int
    ) -> None:
        self.routes[fragment_id] = routes
        plan = compile_fragment(routes, source, self._placement, first_position=first_position)
        self._asks.append((self._looks + self.delay, fragment_id, plan))

    def cancel(self, fragment_id: int) -> None:
        self._asks = [ask for ask in self._asks if ask[1] != fragment_id]

    def completed(self, timeout_seconds: float) -> list[tuple[int, PlanFragment | PlanError]]:
        self._looks += 1
        done = [ask for ask in self._asks if ask[0] < self._looks]
        self._asks = [ask for ask in self._asks if ask[0] >= self._looks]
        return [(fragment_id, plan) for _, fragment_id, plan in done]

    def send_plan(self, rank: Rank, part: PlanPart) -> None:
        held = HeldPlan(part.fragment_id, part.digest)
        self._held.append(PlansHeld(rank, "", [held]))

    def plans_held(self, timeout_seconds: float) -> list[PlansHeld]:
        held, self._held = self._held, []
        return held


class PlannedContentWorkers(ContentWorkers):
    """Replays the routes behind the fragments that a step names."""

    def __init__(self, fragments: Fragments, block_size: int, frame_delay: int) -> None:
        super().__init__(fragments.num_ranks, block_size, frame_delay)
        self._fragments = fragments

    def execute(self, step: StepDescriptor) -> list[StepResult]:
        ends = np.cumsum(step.fragment_lens).tolist()
        route_ids = step.route_ids.copy()
        for i in np.flatnonzero(step.fragment_lens).tolist():
            fragment_ids = step.fragment_ids[ends[i] - step.fragment_lens[i] : ends[i]].tolist()
            parts = [self._fragments.routes[fragment_id] for fragment_id in fragment_ids]
            route_ids[i] = 2**30 + i
            chunk = RouteChunk(
                2**30 + i,
                step.step_id,
                np.concatenate([part.topk_ids for part in parts]),
                np.concatenate([part.topk_weights for part in parts]),
            )
            assert len(chunk.topk_ids) == step.num_tokens[i], "the fragments are not the chunk"
            self.send_routes(Rank(int(step.ranks[i])), chunk)
        for fragment_id in step.evicted_fragment_ids.tolist():
            del self._fragments.routes[fragment_id]
        return super().execute(msgspec.structs.replace(step, route_ids=route_ids))


def make_planned_harness(
    num_ranks: int = 1,
    *,
    fragment_tokens: int = 8,
    memory_bytes: int = 2**20,
    compile_delay: int = 0,
    frame_delay: int = 0,
    **options: int,
) -> EngineHarness:
    """An engine whose replayed tokens travel by plans."""
    fragments = Fragments(num_ranks, compile_delay)
    limits = PlanLimits(
        num_ranks=num_ranks,
        placement_epoch=0,
        fragment_tokens=fragment_tokens,
        memory_bytes=memory_bytes,
        wait_seconds=60.0,
        min_run_tokens=1,
        ahead_tokens=4 * fragment_tokens,
        max_pump_bytes=2**20,
    )
    return EngineHarness(
        PlannedContentWorkers(fragments, 4, frame_delay),
        SHAPE,
        num_ranks=num_ranks,
        block_size=4,
        planned=Planning(limits, fragments, fragments),
        **options,
    )
