"""Which fragments a request that replays wants, has and waits for: a window of its tokens ahead of where it is."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from router_service.features import Features
from router_service.fragment_pool import Fragment, FragmentPool, PlanChannel, PlanCompiler
from router_service.plans import PlannedRun, Unplanned
from router_service.request import Request
from router_service.step_observer import StepObserver


@dataclass(frozen=True)
class PlanLimits:
    num_ranks: int
    placement_epoch: int
    fragment_tokens: int
    """A fragment ends at each multiple of it; 0: the step budget is too small for any plan."""
    memory_bytes: int
    """Per rank."""
    wait_seconds: float
    """How long a request waits for its first plan before it replays negotiated, and at most at one place for room."""
    min_run_tokens: int
    """With fewer to replay a request goes without a plan."""
    ahead_tokens: int
    """Fragments are asked for so far ahead of the next token to compute."""
    max_pump_bytes: int
    """Of plans that are packed and sent between two steps, when no rank computes."""


@dataclass
class _RequestPlan:
    """Of the tokens up to `end`, fragments were asked for up to `asked_end`.

    starts: fragment by the position of its first token, ascending; none from before `position`
    """

    position: int
    asked_end: int
    end: int
    give_up_at: float
    """Then it waits for no plan."""
    room_until: float
    """Then it waits for no room in a step, unless it has advanced."""
    starts: dict[int, Fragment] = field(default_factory=dict)


class PlanBook:
    """Owner of the requests' plans, and of the pool that their fragments are in. The engine's thread only."""

    def __init__(
        self,
        limits: PlanLimits,
        *,
        features: Features,
        compiler: PlanCompiler,
        channel: PlanChannel,
        observer: StepObserver,
        clock: Callable[[], float] = time.monotonic,
        first_fragment_id: int = 0,
    ) -> None:
        """first_fragment_id: more than 0 where the ranks have served another book."""
        self._limits = limits
        self._features = features
        self._clock = clock
        self._pool = FragmentPool(
            num_ranks=limits.num_ranks,
            placement_epoch=limits.placement_epoch,
            memory_bytes=limits.memory_bytes,
            max_pump_bytes=limits.max_pump_bytes,
            compiler=compiler,
            channel=channel,
            observer=observer,
            first_id=first_fragment_id,
        )
        self._by_request: dict[Request, _RequestPlan] = {}

    # --- clients of the scheduler: Plans

    def want(self, request: Request) -> None:
        self.release(request)
        if not self._features.planned_dispatch or not self._limits.fragment_tokens:
            return
        first, end = request.num_computed_tokens, request.num_recorded_tokens
        if first >= end or self._is_short(request):
            return
        deadline = self._clock() + self._limits.wait_seconds
        plan = _RequestPlan(first, first, end, give_up_at=deadline, room_until=deadline)
        self._by_request[request] = plan
        self._ask(request, plan)

    def cover(self, request: Request, limit: int) -> PlannedRun | Unplanned:
        if not self._features.planned_dispatch:
            return Unplanned("planned_off", wait=False)
        if not self._limits.fragment_tokens:
            return Unplanned("step_budget", wait=False)
        plan = self._by_request.get(request)
        if plan is None:  # too short, or planning was off when it was to be wanted
            return Unplanned("too_short" if self._is_short(request) else "planned_off", wait=False)
        self._advance(request, plan)
        self._ask(request, plan)
        return self._run_of(plan, limit)

    def release(self, request: Request) -> None:
        plan = self._by_request.pop(request, None)
        if plan is not None:
            for fragment in plan.starts.values():
                self._pool.give_back(fragment)

    # --- the engine's loop

    def pump(self) -> None:
        self._pool.pump()

    def wait(self, timeout_seconds: float) -> None:
        self._pool.wait(timeout_seconds)

    def take_evicted(self) -> list[int]:
        return self._pool.take_evicted()

    def clear(self) -> None:
        assert not self._by_request, "requests use fragments"
        self._pool.clear()

    @property
    def num_requests(self) -> int:
        """Those that use fragments."""
        return len(self._by_request)

    @property
    def num_fragments(self) -> int:
        return len(self._pool)

    @property
    def num_bytes(self) -> int:
        """Of the largest parts: at most so much on any rank."""
        return self._pool.num_bytes

    def check_invariants(self) -> None:
        """Raises AssertionError. With no request that replays, no fragment is used."""
        plans = self._by_request.values()
        self._pool.check_invariants(
            Counter(f.fragment_id for plan in plans for f in plan.starts.values())
        )
        for plan in plans:
            assert list(plan.starts) == sorted(plan.starts)
            assert all(plan.position <= start < plan.asked_end for start in plan.starts)

    # --- one request

    def _is_short(self, request: Request) -> bool:
        num_tokens = request.num_recorded_tokens - request.num_computed_tokens
        return num_tokens < self._limits.min_run_tokens

    def _advance(self, request: Request, plan: _RequestPlan) -> None:
        """To the request's place. Fragments that begin before it are of no use to it any more."""
        if request.num_computed_tokens == plan.position:
            return
        plan.position = request.num_computed_tokens
        plan.room_until = self._clock() + self._limits.wait_seconds
        while plan.starts and (start := next(iter(plan.starts))) < plan.position:
            self._pool.give_back(plan.starts.pop(start))
        if plan.asked_end < plan.position:
            size = self._limits.fragment_tokens
            plan.asked_end = -(-plan.position // size) * size

    def _ask(self, request: Request, plan: _RequestPlan) -> None:
        """For what the window has become, as far as memory has room."""
        assert request.home_rank is not None
        window_end = min(plan.end, plan.position + self._limits.ahead_tokens)
        while plan.asked_end < window_end:
            start = plan.asked_end
            end = min(plan.end, start + self._to_border(start))
            routes = request.route_log.slice(start, end)
            fragment = self._pool.use(request.namespace, routes, request.home_rank, start)
            if fragment is None:
                return
            plan.starts[start] = fragment
            plan.asked_end = end

    def _run_of(self, plan: _RequestPlan, limit: int) -> PlannedRun | Unplanned:
        first, to_border = plan.starts.get(plan.position), self._to_border(plan.position)
        if first is None:
            reason = "plan_memory" if plan.position == plan.asked_end else "no_border"
            return Unplanned(reason, wait=False, max_num_tokens=to_border)
        if first.refusal is not None:
            return Unplanned(first.refusal, wait=False, max_num_tokens=first.num_tokens)
        if first.num_tokens > limit:
            fits_later = self._clock() < plan.room_until
            return Unplanned("step_budget", wait=False, fits_later=fits_later)
        if not first.ready:
            return Unplanned("plan_not_ready", wait=self._clock() < plan.give_up_at)
        return _ready_run(plan, limit)

    def _to_border(self, position: int) -> int:
        """Tokens from the position to the next border, at least one."""
        size = self._limits.fragment_tokens
        return size - position % size


def _ready_run(plan: _RequestPlan, limit: int) -> PlannedRun:
    ids: list[int] = []
    total = 0
    while (fragment := plan.starts.get(plan.position + total)) is not None:
        if not fragment.ready or total + fragment.num_tokens > limit:
            break
        ids.append(fragment.fragment_id)
        total += fragment.num_tokens
    return PlannedRun(tuple(ids), total)
