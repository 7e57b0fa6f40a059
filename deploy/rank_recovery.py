"""Which process is which rank after the start: those that die are replaced, those that hang are made to die.

    a rank's process ends ─► the engine is told ─► a new process in its place loads, the others let go of its host
          ▲                                                                            │
          │                                                               somebody hosts a rendezvous
          │                                                                            │
          └── it ends, or another does, until they have come together ◄── all join ◄───┘

Nobody is told where to meet before all have their weights: whoever dies until then costs only the time of its own
place, and who still loads goes on.
One that gives no sign of life is killed and counts as lost at once: with its host gone, Ray may take a minute to know.

Nothing here waits: `tick` looks at what has come of what was asked for. How long it may take in all is the engine's
limit; it ends the cell then.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.log import logger
from cluster.messages import GroupWanted, Regroup, WeightsServed
from deploy.pulse import killed_after

PULSE_SECONDS = 3.0
"""A process that does not say within this time that it lives hangs."""
SILENCE_SECONDS = 5.0
"""After so long, and then twice as long each time, who loads or is to say where to meet is asked for a sign of life."""
DEATH_SECONDS = 2.0
"""Within this time Ray tells that a process has died; an exchange that broke without a death has another reason."""

_LOG = logger("recovery")
Call = Any
"""What a call to another process will give."""


class RankProcesses(Protocol):
    """Processes by rank, in Ray."""

    def can_replace(self) -> bool:
        """Whether processes can be started now: Ray starts none while its head is away."""
        ...

    def start(self, rank: int) -> Call:
        """In place of one that ended. Gives something when the process is there; Ray may have to find room first."""
        ...

    def kill(self, rank: int) -> None:
        """Also one that is stopped, or whose host is not reached. Its end is not told to `RankRecovery.lost` any more.
        Idempotent."""
        ...

    def let_go(self, rank: int, lost: Collection[int]) -> Call:
        """A rank that lived ends its connections to hosts that went with lost ranks, which would keep it waiting. That
        it has done so is a sign of life, too."""
        ...

    def host_rendezvous(self, rank: int) -> Call:
        """Gives (address, port)."""
        ...

    def load(self, rank: int, model_dir: str) -> Call:
        """The rank's weights; again in place of others."""
        ...

    def join(self, rank: int, address: str, port: int) -> Call:
        """With the weights that it has, into the group."""
        ...

    def run(self, rank: int, generation: int, joined: Any) -> None:
        """It serves the engine until it ends, which is then told to `RankRecovery.lost`. joined: what `join` gave."""
        ...

    def pulse(self, rank: int) -> Call: ...

    def result(self, call: Call) -> tuple[bool, Any]:
        """Whether it has ended well, and what it gave; (False, None) while it goes on, (False, why) when it failed."""
        ...


class EngineLine(Protocol):
    def rank_lost(self, rank: int, reason: str) -> None: ...

    def regroup(self, regroup: Regroup) -> None: ...

    def take_wanted(self) -> list[GroupWanted]: ...

    @property
    def weights(self) -> WeightsServed: ...


@dataclass
class _Attempt:
    """To bring the ranks together. joins: of new processes, once the engine has been told where."""

    rendezvous: Call
    letting_go: dict[int, Call]
    """Of those that lived."""
    due_seconds: float
    """When they have to have answered."""
    ask_at: float
    """When all are asked for a sign of life, if they have not been told by then."""
    patience: float = SILENCE_SECONDS
    joins: dict[int, Call] = field(default_factory=dict)
    weights: WeightsServed | None = None
    """That those who join have, once they are told."""
    is_told: bool = False


@dataclass(frozen=True)
class _Load:
    call: Call
    weights: WeightsServed
    """That were served when it was asked for."""


class RankRecovery:
    def __init__(
        self,
        num_ranks: int,
        processes: RankProcesses,
        engine: EngineLine,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_ranks = num_ranks
        self._processes = processes
        self._engine = engine
        self._clock = clock
        self._generation = 0
        self._dead: set[int] = set()
        """Ranks without a process."""
        self._loads: dict[int, _Load] = {}
        """Of ranks with one that has not been told to join yet."""
        self._attempt: _Attempt | None = None
        self._regroup_at: float | None = None
        """When a group is made of whoever lives then, if nobody is found dead before."""
        self._pulses: dict[int, Call] = {}
        self._pulses_due = 0.0
        self._starting: dict[int, Call] = {}
        """Processes that may not be there yet, which is no silence."""
        self._came_with = dict.fromkeys(range(num_ranks), 0)
        """By rank: the group that its process was started for."""

    @property
    def is_under_way(self) -> bool:
        busy = self._attempt or self._dead or self._loads or self._pulses
        return bool(busy) or self._regroup_at is not None

    def lost(self, rank: int, reason: str) -> None:
        """Its process has ended, or cannot be reached."""
        _LOG.error("rank lost rank=%d reason=%r", rank, reason)
        self._engine.rank_lost(rank, reason)
        self._pulses.pop(rank, None)
        self._loads.pop(rank, None)
        self._dead.add(rank)
        self._give_up()

    def tick(self) -> None:
        for wanted in self._engine.take_wanted():
            self._take(wanted)
        self._look_at_pulses()
        if self._attempt is not None:
            self._advance(self._attempt)
        elif not self._pulses and (self._dead or self._is_due()) and self._can_begin():
            self._begin()

    def _take(self, wanted: GroupWanted) -> None:
        if wanted.generation != self._generation:
            return
        if self._attempt is not None and self._attempt.is_told:
            if self._attempt.joins and wanted.silent_ranks:
                self._ask_for_pulses()  # who waits for those who join is silent, too
                return
            self._give_up()  # its ranks did not come together
        if self._attempt is not None or self._dead or self._regroup_at is not None:
            return
        self._regroup_at = self._clock() + (PULSE_SECONDS if wanted.silent_ranks else DEATH_SECONDS)
        if wanted.silent_ranks:
            self._ask_for_pulses()

    def engine_back(self) -> None:
        """It was lost, and another in its place knows of no group: all ranks meet for it."""
        self._give_up()
        self._pulses.clear()
        self._regroup_at = self._clock()

    def _ask_for_pulses(self) -> None:
        if self._pulses:
            return
        there = [rank for rank in range(self._num_ranks) if self._is_there(rank)]
        self._pulses = {rank: self._processes.pulse(rank) for rank in there}
        self._pulses_due = self._clock() + PULSE_SECONDS

    def _is_there(self, rank: int) -> bool:
        if rank in self._starting and self._processes.result(self._starting[rank])[0]:
            del self._starting[rank]
        return rank not in self._starting

    def _is_due(self) -> bool:
        return self._regroup_at is not None and self._clock() >= self._regroup_at

    def _can_begin(self) -> bool:
        return not self._dead or self._processes.can_replace()

    def _look_at_pulses(self) -> None:
        self._pulses = {
            rank: call for rank, call in self._pulses.items() if not self._processes.result(call)[0]
        }
        if not self._pulses or self._clock() < self._pulses_due:
            return
        self._lose_silent(self._pulses)

    def _lose_silent(self, ranks: Iterable[int]) -> None:
        for rank in list(ranks):
            self._processes.kill(rank)
            self.lost(rank, killed_after(PULSE_SECONDS))

    def _give_up(self) -> None:
        """What was under way. Those who join would wait for a group that does not come; those who load go on."""
        attempt, self._attempt = self._attempt, None
        for rank in attempt.joins if attempt is not None else ():
            self._processes.kill(rank)
            self._dead.add(rank)

    def _begin(self) -> None:
        self._regroup_at = None
        lived = [
            rank
            for rank in range(self._num_ranks)
            if rank not in self._dead and rank not in self._loads
        ]
        letting_go = {rank: self._processes.let_go(rank, self._dead) for rank in lived}
        if self._dead:
            _LOG.info("ranks start again ranks=%r", sorted(self._dead))
        for rank in sorted(self._dead):
            self._starting[rank] = self._processes.start(rank)
            self._load(rank)
        self._dead.clear()
        now = self._clock()
        self._attempt = _Attempt(
            self._processes.host_rendezvous(lived[0] if lived else 0),
            letting_go,
            due_seconds=now + PULSE_SECONDS,
            ask_at=now + SILENCE_SECONDS,
        )

    def _load(self, rank: int) -> None:
        weights = self._engine.weights
        self._loads[rank] = _Load(self._processes.load(rank, weights.model_dir), weights)

    def _advance(self, attempt: _Attempt) -> None:
        if not attempt.is_told:
            if self._have_let_go(attempt) and self._have_loaded(attempt):
                self._tell(attempt)
            if attempt is self._attempt and not attempt.is_told:
                self._ask_who_takes_long(attempt)
            return
        for rank, call in list(attempt.joins.items()):
            done, result = self._processes.result(call)
            if done and attempt.weights != self._engine.weights:
                del attempt.joins[rank]
                self._processes.kill(rank)
                self.lost(rank, "it had loaded other weights than are served by now")
                return
            if done:
                del attempt.joins[rank]
                self._came_with[rank] = self._generation
                self._processes.run(rank, self._generation, result)
            elif result is not None:
                del attempt.joins[rank]
                self._processes.kill(rank)
                self.lost(rank, str(result))
                return
        if not attempt.joins:
            self._attempt = None

    def _have_let_go(self, attempt: _Attempt) -> bool:
        """Not before may they meet: what is let go of late might be a connection to the new process."""
        attempt.letting_go = {
            rank: call
            for rank, call in attempt.letting_go.items()
            if not self._processes.result(call)[0]
        }
        if attempt.letting_go and self._clock() >= attempt.due_seconds:
            self._lose_silent(attempt.letting_go)
        return not attempt.letting_go

    def _have_loaded(self, attempt: _Attempt) -> bool:
        """All that are to join, the weights that are served now."""
        loading = False
        for rank, load in list(self._loads.items()):
            done, result = self._processes.result(load.call)
            if not done and result is not None:
                self._processes.kill(rank)
                self.lost(rank, str(result))
                return False
            if done and load.weights != self._engine.weights:
                self._load(rank)
            loading = loading or not done or load.weights != self._engine.weights
        return not loading

    def _ask_who_takes_long(self, attempt: _Attempt) -> None:
        """To load, or to say where to meet."""
        now = self._clock()
        if now >= attempt.ask_at:
            attempt.patience *= 2
            attempt.ask_at = now + attempt.patience
            self._ask_for_pulses()

    def _tell(self, attempt: _Attempt) -> None:
        done, result = self._processes.result(attempt.rendezvous)
        if not done:
            if result is not None:
                _LOG.warning("no rendezvous reason=%r", result)
                self._give_up()
                self._regroup_at = self._clock() + DEATH_SECONDS
            return
        address, port = result
        self._generation += 1
        joining = {rank: came for rank, came in self._came_with.items() if rank not in self._loads}
        self._engine.regroup(Regroup(self._generation, address, port, joining))
        attempt.is_told = True
        attempt.weights = self._engine.weights
        _LOG.info(
            "ranks meet generation=%d at=%s:%d new_ranks=%r",
            *(self._generation, address, port, sorted(self._loads)),
        )
        attempt.joins = {
            rank: self._processes.join(rank, address, port) for rank in sorted(self._loads)
        }
        self._loads.clear()
