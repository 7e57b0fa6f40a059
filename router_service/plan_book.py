"""Plan fragments of the cell: made when a request has something to replay, sent ahead, used once every rank has them.

A fragment is named by its routes, its source rank, the placement and, where that has several copies of an expert, the
position of its first token; so a stale one cannot be met: other routes are another fragment. Several requests and later
replays share it; the least recently used go when a rank's budget is full.

    wanted ──compiler's thread──► compiled ──PlanPart to each rank──► sent ──PlansHeld from all──► ready ──► evicted
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cluster.dispatch_plan import PlanFragment
from cluster.messages import PlanPart
from cluster.routes import ExpertRoutes
from cluster.types import Rank
from router_service.features import Features
from router_service.plans import PlannedRun, Unplanned
from router_service.request import Request
from router_service.step_observer import StepObserver


class PlanCompiler(Protocol):
    """Compiles beside the engine's loop, in the order of the asks."""

    @property
    def position_period(self) -> int:
        """Routes whose first positions differ by a multiple of it have the same plan."""
        ...

    def submit(
        self, fragment_id: int, routes: ExpertRoutes, source: Rank, first_position: int
    ) -> None: ...

    def completed(self, timeout_seconds: float) -> list[tuple[int, PlanFragment]]:
        """What is done; waits up to the timeout for the first one. Raises what the compiler raised."""
        ...


class PlanChannel(Protocol):
    """To the ranks and back."""

    def send_plan(self, rank: Rank, part: PlanPart) -> None: ...

    def plans_held(self, timeout_seconds: float) -> list[tuple[Rank, list[int]]]:
        """Acknowledgements of the ranks' present processes; waits up to the timeout for the first one."""
        ...


@dataclass(frozen=True)
class PlanLimits:
    num_ranks: int
    placement_epoch: int
    fragment_tokens: int
    """A fragment ends at each multiple of it; 0: the step budget is too small for any plan."""
    memory_bytes: int
    """Per rank."""
    wait_seconds: float
    """How long a request waits for its first plan before it replays negotiated."""


@dataclass
class _Fragment:
    fragment_id: int
    key: bytes
    num_tokens: int
    missing_ranks: set[int]
    num_bytes: int = 0
    """Of the largest part; 0 until compiled."""
    num_users: int = 0
    last_use: int = 0
    refused: bool = False
    """Compiled while all memory was taken by fragments in use: no rank was given it, and none will be."""

    @property
    def ready(self) -> bool:
        return not self.missing_ranks


@dataclass
class _RequestPlan:
    """starts: fragment by the position of its first token."""

    starts: dict[int, _Fragment] = field(default_factory=dict)
    give_up_at: float = 0.0


class PlanBook:
    """Owner of all fragments of the cell; says what ranks hold and drop. The engine's thread only."""

    def __init__(
        self,
        limits: PlanLimits,
        *,
        features: Features,
        compiler: PlanCompiler,
        channel: PlanChannel,
        observer: StepObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._features = features
        self._compiler = compiler
        self._channel = channel
        self._observer = observer
        self._clock = clock
        self._by_key: dict[bytes, _Fragment] = {}
        self._by_id: dict[int, _Fragment] = {}
        self._by_request: dict[Request, _RequestPlan] = {}
        self._evicted: list[int] = []
        self._num_compiling = 0
        self._num_bytes = 0
        self._uses = 0
        self._next_id = 0

    # --- clients of the scheduler: Plans

    def want(self, request: Request) -> None:
        first, end = request.num_computed_tokens, request.num_recorded_tokens
        size = self._limits.fragment_tokens
        if not self._features.planned_dispatch or not size or first >= end:
            return
        self.release(request)
        plan = _RequestPlan(give_up_at=self._clock() + self._limits.wait_seconds)
        self._by_request[request] = plan
        while first < end:
            border = min(end, (first // size + 1) * size)
            plan.starts[first] = self._fragment(request, first, border)
            first = border

    def cover(self, request: Request, limit: int) -> PlannedRun | Unplanned:
        plan = self._by_request.get(request)
        if plan is None or not self._features.planned_dispatch:
            reason = "planned_off" if self._limits.fragment_tokens else "step_budget"
            return Unplanned(reason, wait=False)
        position, ids = request.num_computed_tokens, []
        first = plan.starts.get(position)
        if first is None:
            return Unplanned("no_border", wait=False, max_num_tokens=self._to_border(position))
        if first.num_tokens > limit:
            return Unplanned("step_budget", wait=False, fits_later=True)
        if first.refused:
            return Unplanned("plan_memory", wait=False, max_num_tokens=first.num_tokens)
        if not first.ready:
            return Unplanned("plan_not_ready", wait=self._clock() < plan.give_up_at)
        total = 0
        while (fragment := plan.starts.get(position + total)) is not None:
            if not fragment.ready or total + fragment.num_tokens > limit:
                break
            ids.append(fragment.fragment_id)
            total += fragment.num_tokens
        return PlannedRun(tuple(ids), total)

    def release(self, request: Request) -> None:
        plan = self._by_request.pop(request, None)
        if plan is None:
            return
        self._uses += 1
        for fragment in plan.starts.values():
            fragment.num_users -= 1
            fragment.last_use = self._uses
            if fragment.refused and not fragment.num_users:
                del self._by_id[fragment.fragment_id]

    # --- the engine's loop

    def pump(self) -> None:
        """Sends what has been compiled, as far as there is room, and takes acknowledgements. Never waits."""
        self._take(self._channel.plans_held(0.0))
        self._send(self._compiler.completed(0.0) if self._num_compiling else [])

    def wait(self, timeout_seconds: float) -> None:
        """Until there is progress on some fragment, or the timeout has passed."""
        if self._num_compiling:
            self._send(self._compiler.completed(timeout_seconds))
        else:
            self._take(self._channel.plans_held(timeout_seconds))

    def take_evicted(self) -> list[int]:
        """Ids for the next step's descriptor, once."""
        evicted, self._evicted = self._evicted, []
        return evicted

    @property
    def num_requests(self) -> int:
        """Those that use fragments."""
        return len(self._by_request)

    @property
    def num_fragments(self) -> int:
        return len(self._by_id)

    @property
    def num_bytes(self) -> int:
        """Of the largest parts: at most so much on any rank."""
        return self._num_bytes

    def check_invariants(self) -> None:
        """Raises AssertionError. With no request that replays, no fragment is used."""
        uses = Counter(f.fragment_id for p in self._by_request.values() for f in p.starts.values())
        assert {f.fragment_id for f in self._by_key.values()} == {
            f.fragment_id for f in self._by_id.values() if not f.refused
        }
        assert self._num_bytes <= self._limits.memory_bytes
        assert set(uses) <= set(self._by_id), "a fragment in use was evicted"
        for fragment in self._by_id.values():
            assert fragment.num_users == uses[fragment.fragment_id]
        assert self._num_bytes == sum(f.num_bytes for f in self._by_id.values())

    # --- fragments

    def _to_border(self, position: int) -> int:
        size = self._limits.fragment_tokens
        return size - position % size

    def _fragment(self, request: Request, start: int, end: int) -> _Fragment:
        assert request.home_rank is not None
        routes = request.route_log.slice(start, end)
        first_position = start % self._compiler.position_period
        key = self._key(routes, request.home_rank, first_position)
        fragment = self._by_key.get(key)
        self._observer.planned_fragment(hit=fragment is not None)
        if fragment is None:
            fragment = _Fragment(
                self._next_id, key, end - start, set(range(self._limits.num_ranks))
            )
            self._next_id += 1
            self._by_key[key] = self._by_id[fragment.fragment_id] = fragment
            self._num_compiling += 1
            self._compiler.submit(fragment.fragment_id, routes, request.home_rank, first_position)
        fragment.num_users += 1
        return fragment

    def _key(self, routes: ExpertRoutes, source: Rank, first_position: int) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        numbers = source, self._limits.placement_epoch, first_position, routes.num_tokens
        digest.update(repr(numbers).encode())
        digest.update(routes.topk_ids.tobytes())
        digest.update(routes.topk_weights.tobytes())
        return digest.digest()

    def _send(self, completed: list[tuple[int, PlanFragment]]) -> None:
        for fragment_id, plan in completed:
            self._num_compiling -= 1
            fragment = self._by_id[fragment_id]
            num_bytes = max(part.num_bytes for part in plan.receive) + plan.send.num_bytes
            if not self._make_room(num_bytes):
                self._refuse(fragment)
                continue
            fragment.num_bytes = num_bytes
            self._num_bytes += num_bytes
            for rank in range(self._limits.num_ranks):
                self._channel.send_plan(Rank(rank), _part(fragment_id, plan, rank))

    def _take(self, held: list[tuple[Rank, list[int]]]) -> None:
        for rank, fragment_ids in held:
            for fragment_id in fragment_ids:
                fragment = self._by_id.get(fragment_id)
                if fragment is not None:
                    fragment.missing_ranks.discard(rank)

    def _refuse(self, fragment: _Fragment) -> None:
        """Those who want it next may find room."""
        fragment.refused = True
        del self._by_key[fragment.key]
        if not fragment.num_users:
            del self._by_id[fragment.fragment_id]

    def _make_room(self, num_bytes: int) -> bool:
        """Evicts what nobody uses, the least recently used first, until so much more fits. False if it does not."""
        most = self._limits.memory_bytes - num_bytes
        if self._num_bytes <= most:
            return True
        idle = [f for f in self._by_id.values() if f.ready and not f.num_users]
        if self._num_bytes - sum(f.num_bytes for f in idle) > most:
            return False
        for fragment in sorted(idle, key=lambda f: f.last_use):
            if self._num_bytes <= most:
                break
            del self._by_id[fragment.fragment_id], self._by_key[fragment.key]
            self._num_bytes -= fragment.num_bytes
            self._evicted.append(fragment.fragment_id)
        return True


def _part(fragment_id: int, plan: PlanFragment, rank: int) -> PlanPart:
    return PlanPart(
        fragment_id=fragment_id,
        source=plan.source,
        placement_epoch=plan.placement_epoch,
        num_tokens=plan.num_tokens,
        send=plan.send if rank == plan.source else None,
        receive=plan.receive[rank],
    )
