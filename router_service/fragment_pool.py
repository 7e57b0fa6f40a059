"""Plan fragments of the cell: asked of the compiler, sent ahead, used once every rank has them, evicted.

A fragment is named by its routes, its source rank, the placement and, where that has several copies of an expert, the
position of its first token; so a stale one cannot be met: other routes are another fragment. Requests and later replays
of one namespace share it, and nobody else: or the time of a replay would tell that another tenant had replayed the same
prompt. The least recently used go when a rank's budget is full.

    asked ──compiler's thread──► unsent ──PlanPart to each rank──► sent ──PlansHeld from all──► ready ──► evicted
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cluster.dispatch_plan import PlanFragment, fragment_digest
from cluster.errors import PlanError
from cluster.log import logger
from cluster.routes import ExpertRoutes
from cluster.types import Namespace, Rank
from cluster.worker_messages import PlanPart, PlansHeld
from router_service.step_observer import StepObserver

_LOG = logger("plans")


class PlanCompiler(Protocol):
    """Compiles beside the engine's loop, in the order of the asks."""

    @property
    def position_period(self) -> int:
        """Routes whose first positions differ by a multiple of it have the same plan."""
        ...

    def submit(
        self, fragment_id: int, routes: ExpertRoutes, source: Rank, first_position: int
    ) -> None: ...

    def cancel(self, fragment_id: int) -> None:
        """Nobody wants it any more; it may be completed all the same."""
        ...

    def completed(self, timeout_seconds: float) -> list[tuple[int, PlanFragment | PlanError]]:
        """What is done, or why it cannot be; waits up to the timeout for the first one."""
        ...


class PlanChannel(Protocol):
    """To the ranks and back."""

    def send_plan(self, rank: Rank, part: PlanPart) -> None: ...

    def plans_held(self, timeout_seconds: float) -> list[PlansHeld]:
        """Acknowledgements of the ranks' present processes; waits up to the timeout for the first one."""
        ...


@dataclass(eq=False)
class Fragment:
    """Written by the pool alone."""

    fragment_id: int
    namespace: Namespace
    digest: bytes
    num_tokens: int
    missing_ranks: set[int]
    num_bytes: int = 0
    """Of the largest part; 0 while no rank was sent any."""
    num_users: int = 0
    last_use: int = 0
    refusal: str | None = None
    """The fallback reason of its tokens, when no step will name it."""

    @property
    def name(self) -> tuple[Namespace, bytes]:
        return self.namespace, self.digest

    @property
    def ready(self) -> bool:
        return not self.missing_ranks and self.refusal is None


class FragmentPool:
    """Owner of all fragments; says what ranks hold and drop. The engine's thread only."""

    def __init__(
        self,
        *,
        num_ranks: int,
        placement_epoch: int,
        memory_bytes: int,
        max_pump_bytes: int,
        compiler: PlanCompiler,
        channel: PlanChannel,
        observer: StepObserver,
        first_id: int,
    ) -> None:
        """memory_bytes: per rank. max_pump_bytes: of plans to all ranks that leave at once; one begun is sent whole.

        first_id: ids count up from it. Ranks refuse one that they know for another fragment's.
        """
        self._num_ranks = num_ranks
        self._placement_epoch = placement_epoch
        self._memory_bytes = memory_bytes
        self._max_pump_bytes = max_pump_bytes
        self._compiler = compiler
        self._channel = channel
        self._observer = observer
        self._by_name: dict[tuple[Namespace, bytes], Fragment] = {}
        """Those that one more of their namespace may use."""
        self._by_id: dict[int, Fragment] = {}
        self._asked: set[int] = set()
        self._unsent: dict[int, PlanFragment] = {}
        self._evicted: list[int] = []
        self._num_bytes = 0
        self._num_bytes_in_use = 0
        self._largest_num_bytes = 0
        self._num_uses = 0
        self._next_id = first_id

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_bytes(self) -> int:
        """Of the largest parts: at most so much on any rank."""
        return self._num_bytes

    # --- users

    def use(
        self, namespace: Namespace, routes: ExpertRoutes, source: Rank, first_position: int
    ) -> Fragment | None:
        """The namespace's fragment with one user more, asked for if it is not known. None, and nothing asked, while
        fragments in use leave no room for another."""
        first_position %= self._compiler.position_period
        digest = fragment_digest(routes, source, self._placement_epoch, first_position)
        fragment = self._by_name.get((namespace, digest))
        if fragment is None and not self._has_room:
            return None
        self._observer.planned_fragment(hit=fragment is not None)
        if fragment is None:
            fragment = self._add(namespace, digest, routes.num_tokens)
            self._compiler.submit(fragment.fragment_id, routes, source, first_position)
        if not fragment.num_users:
            self._num_bytes_in_use += fragment.num_bytes
        fragment.num_users += 1
        return fragment

    def give_back(self, fragment: Fragment) -> None:
        """By one of its users. What no rank was sent yet is not made for nobody."""
        fragment.num_users -= 1
        if fragment.num_users:
            return
        self._num_uses += 1
        fragment.last_use = self._num_uses
        self._num_bytes_in_use -= fragment.num_bytes
        if fragment.refusal is not None:
            del self._by_id[fragment.fragment_id]
        elif not fragment.num_bytes:
            self._cancel(fragment)

    @property
    def _has_room(self) -> bool:
        """For one as large as any so far, beside those in use and those to come."""
        num_coming = len(self._asked) + len(self._unsent) + 1
        most = self._memory_bytes - self._num_bytes_in_use
        return num_coming * self._largest_num_bytes <= most

    def _add(self, namespace: Namespace, digest: bytes, num_tokens: int) -> Fragment:
        ranks = set(range(self._num_ranks))
        fragment = Fragment(self._next_id, namespace, digest, num_tokens, ranks)
        self._next_id += 1
        self._by_name[fragment.name] = self._by_id[fragment.fragment_id] = fragment
        self._asked.add(fragment.fragment_id)
        return fragment

    def _cancel(self, fragment: Fragment) -> None:
        fragment_id = fragment.fragment_id
        del self._by_id[fragment_id], self._by_name[fragment.name]
        self._unsent.pop(fragment_id, None)
        if fragment_id in self._asked:
            self._asked.remove(fragment_id)
            self._compiler.cancel(fragment_id)

    # --- the engine's loop

    def pump(self) -> None:
        """Takes acknowledgements and sends what has been compiled, as far as there is room and it may leave at once.
        Never waits."""
        self._take_held(self._channel.plans_held(0.0))
        self._send(self._compiler.completed(0.0) if self._asked else [])

    def wait(self, timeout_seconds: float) -> None:
        """Until there is progress on some fragment, or the timeout has passed."""
        if self._unsent:
            self._send([])
        elif self._asked:
            self._send(self._compiler.completed(timeout_seconds))
        else:
            self._take_held(self._channel.plans_held(timeout_seconds))

    def take_evicted(self) -> list[int]:
        """Ids for the next step's descriptor, once."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def clear(self) -> None:
        """Evicts all. Nobody uses any: so all are with the ranks, or were cancelled."""
        for fragment in list(self._by_id.values()):
            assert not fragment.num_users, "a fragment in use"
            del self._by_id[fragment.fragment_id], self._by_name[fragment.name]
            self._evict(fragment)

    def _send(self, compiled: list[tuple[int, PlanFragment | PlanError]]) -> None:
        for fragment_id, plan in compiled:
            if fragment_id in self._asked:  # else it was cancelled too late
                self._asked.remove(fragment_id)
                self._take_compiled(self._by_id[fragment_id], plan)
        num_sent_bytes = 0
        while self._unsent and num_sent_bytes < self._max_pump_bytes:
            fragment_id = next(iter(self._unsent))
            num_sent_bytes += self._send_one(
                self._by_id[fragment_id], self._unsent.pop(fragment_id)
            )

    def _take_compiled(self, fragment: Fragment, plan: PlanFragment | PlanError) -> None:
        if isinstance(plan, PlanError):
            self._fail(fragment, str(plan))
        elif plan.digest != fragment.digest:
            self._fail(fragment, "another fragment was compiled than the one asked for")
        elif not plan.parts_agree:
            self._fail(fragment, "ranks would expect other rows than its source sends")
        else:
            self._largest_num_bytes = max(self._largest_num_bytes, _num_bytes_of_rank(plan))
            self._unsent[fragment.fragment_id] = plan

    def _send_one(self, fragment: Fragment, plan: PlanFragment) -> int:
        """Returns the bytes that were sent."""
        num_bytes = _num_bytes_of_rank(plan)
        if not self._make_room(num_bytes):
            self._refuse(fragment, "plan_memory")
            return 0
        fragment.num_bytes = num_bytes
        self._num_bytes += num_bytes
        self._num_bytes_in_use += num_bytes
        for rank in range(self._num_ranks):
            self._channel.send_plan(Rank(rank), _part(fragment.fragment_id, plan, rank))
        return plan.num_bytes

    def _take_held(self, messages: list[PlansHeld]) -> None:
        for message in messages:
            for held in message.held:
                fragment = self._by_id.get(held.fragment_id)
                if fragment is None or not fragment.num_bytes:
                    continue
                if held.digest == fragment.digest:
                    fragment.missing_ranks.discard(message.rank)
                else:
                    self._fail(fragment, f"rank {message.rank} holds another one under its id")

    # --- ends of fragments

    def _fail(self, fragment: Fragment, why: str) -> None:
        _LOG.warning("plan_failed fragment=%d why=%r", fragment.fragment_id, why)
        self._refuse(fragment, "plan_failed")

    def _refuse(self, fragment: Fragment, reason: str) -> None:
        """For those who use it; who wants it next asks anew."""
        fragment.refusal = reason
        del self._by_name[fragment.name]
        if fragment.num_users:
            self._num_bytes_in_use -= fragment.num_bytes
        else:
            del self._by_id[fragment.fragment_id]
        if fragment.num_bytes:
            self._evict(fragment)

    def _make_room(self, num_bytes: int) -> bool:
        """Evicts what nobody uses, the least recently used first, until so much more fits. False if it does not."""
        most = self._memory_bytes - num_bytes
        if self._num_bytes <= most:
            return True
        idle = [f for f in self._by_id.values() if f.ready and not f.num_users]
        if self._num_bytes - sum(f.num_bytes for f in idle) > most:
            return False
        for fragment in sorted(idle, key=lambda f: f.last_use):
            if self._num_bytes <= most:
                break
            del self._by_id[fragment.fragment_id], self._by_name[fragment.name]
            self._evict(fragment)
        return True

    def _evict(self, fragment: Fragment) -> None:
        self._num_bytes -= fragment.num_bytes
        fragment.num_bytes = 0
        self._evicted.append(fragment.fragment_id)

    def check_invariants(self, num_users: Mapping[int, int]) -> None:
        """num_users: by fragment id, of those that have any. Raises AssertionError."""
        fragments = self._by_id.values()
        usable = {f.fragment_id for f in fragments if f.refusal is None}
        assert {f.fragment_id for f in self._by_name.values()} == usable
        assert self._num_bytes <= self._memory_bytes
        assert set(num_users) <= set(self._by_id), "a fragment in use was evicted"
        coming = {f.fragment_id for f in fragments if not f.num_bytes and f.refusal is None}
        assert coming == self._asked | set(self._unsent)
        for fragment in fragments:
            assert fragment.num_users == num_users.get(fragment.fragment_id, 0)
            assert fragment.num_users or (fragment.num_bytes and fragment.refusal is None)
        assert self._num_bytes == sum(f.num_bytes for f in fragments)
        assert self._num_bytes_in_use == sum(f.num_bytes for f in fragments if f.num_users)


def _num_bytes_of_rank(plan: PlanFragment) -> int:
    """At most, on any rank."""
    return max(part.num_bytes for part in plan.receive) + plan.send.num_bytes


def _part(fragment_id: int, plan: PlanFragment, rank: int) -> PlanPart:
    return PlanPart(
        fragment_id=fragment_id,
        digest=plan.digest,
        source=plan.source,
        placement_epoch=plan.placement_epoch,
        num_tokens=plan.num_tokens,
        send=plan.send if rank == plan.source else None,
        receive=plan.receive[rank],
    )
