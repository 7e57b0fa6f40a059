"""From a group of ranks that broke to one that can run the next step: what the engine does until then.

    break ── discard the open step ── ask the launcher ── Regroup ── JoinGroup ──► WorkerReady of every rank ── go on
                                                             ▲                              │
                                                             └──── another rank dies ◄──────┘

The launcher finds out who died or hangs, starts processes in their place and says where all meet; a rank whose process
is a new one has lost its KV. Ranks that lived keep weights, KV and what they know of sequences. An engine in place of
another that is lost begins so, too: for it every rank is a new one.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from cluster.errors import CellError, DeadlineError, GroupBrokenError, RankLostError
from cluster.log import logger
from cluster.messages import GroupWanted, LastRecovery, Regroup
from cluster.worker_messages import (
    CellIdentity,
    GroupBroken,
    JoinGroup,
    ToEngineFromWorker,
    WorkerReady,
)
from router_service.engine import Engine
from router_service.engine_life import EngineLife
from router_service.rank_loss import LostRanks
from router_service.worker_client import WorkerClient

ENGINE_LOST = "the engine was lost"
POLL_SECONDS = 0.02
"""How often it is looked whether the launcher has said where to meet."""
BLAME_SECONDS = 3.0
"""How long the launcher may take to name a dead rank after an exchange broke, where that ends the cell."""
SILENCE_SECONDS = 5.0
"""After so long, and then twice as long each time, the launcher is told who has not joined: one of them may hang."""
MAX_IN_A_ROW = 3
"""Recoveries from broken steps, with no step in between that did not break: then the step is to blame."""

_LOG = logger("recovery")


class RecoverySurroundings(Protocol):
    """The process around the engine."""

    @property
    def regroup(self) -> Regroup | None:
        """The launcher's last word."""
        ...

    def ask_for_group(self, wanted: GroupWanted) -> None: ...

    def recovers_from(self, reason: str) -> None:
        """What whoever asks is told until the next step can run; again when more is known."""
        ...


@dataclass(frozen=True)
class Recovered:
    """new_ranks: whose process came in place of one that was lost; the others kept theirs, with weights and KV."""

    generation: int
    reason: str
    seconds: float
    new_ranks: list[int]
    kept_ranks: list[int]
    lost: LostRanks

    @property
    def report(self) -> LastRecovery:
        return LastRecovery(
            self.generation, self.reason, round(self.seconds, 3), self.new_ranks, self.kept_ranks
        )


@dataclass
class _Orders:
    """Who has to be told where all meet, and when the launcher is told who has not come."""

    ask_at: float
    group: Regroup | None = None
    first_generation: int | None = None
    untold: dict[int, int] = field(default_factory=dict)
    patience: float = SILENCE_SECONDS

    def begin(self, group: Regroup, now: float) -> None:
        self.group, self.untold = group, group.joining_ranks
        if self.first_generation is None:
            self.first_generation = group.generation
        self.ask_at = now + self.patience

    def kept(self, rank: int) -> bool:
        """Whether its process was there before: it was told to join, and not started for a group of these orders."""
        assert self.group is not None
        assert self.first_generation is not None
        came = self.group.joining_ranks.get(rank)
        return came is not None and came < self.first_generation

    def are_silent(self, now: float) -> bool:
        """Once after each time of patience, which grows."""
        if now <= self.ask_at:
            return False
        self.patience *= 2
        self.ask_at = now + self.patience
        return True


class Recovery:
    """One at a time. Serves clients while it waits, as a step does."""

    def __init__(
        self,
        engine: Engine,
        workers: WorkerClient,
        around: RecoverySurroundings,
        identity: CellIdentity,
        *,
        limit_seconds: float,
        life: EngineLife,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limit_seconds: from the break on; 0: whatever breaks ends the cell."""
        self._engine = engine
        self._workers = workers
        self._around = around
        self._identity = identity
        self._limit_seconds = limit_seconds
        self._life = life
        self._clock = clock
        self._generation = 0
        self._num_in_a_row = 0
        self._num_steps_at_last = 0
        self._reason = ""
        self._lost_reasons: dict[int, RankLostError] = {}
        """By rank, the latest since the break."""
        self.last: LastRecovery | None = None

    def run(self, error: CellError) -> Recovered:
        """Returns when the next step can run. Raises CellError when the cell has to end."""
        if not self._limit_seconds:
            raise self._named(error)
        started = self._clock()
        self._engine.discard_step()
        self._count(error)
        _LOG.warning("group broken generation=%d reason=%r", self._generation, str(error))
        self._ask(str(error), error.silent_ranks if isinstance(error, DeadlineError) else ())
        self._begin(str(error), error if isinstance(error, RankLostError) else None)
        recovered = self._come_together(started)
        lost = recovered.lost
        self._log(
            recovered,
            f"requests={lost.num_requests} routed_tokens={lost.num_routed_tokens} "
            f"unrouted_tokens={lost.num_unrouted_tokens}",
        )
        return recovered

    def come_back(self) -> Recovered:
        """In place of an engine that is lost: returns when the first step can run. Raises CellError as `run` does.

        It has no requests yet; of those that it takes up again later `StepMetrics` tells."""
        lost_seconds = self._life.lost_seconds
        started = self._clock() if lost_seconds is None else lost_seconds
        why = self._life.lost_reason
        self._begin(f"{ENGINE_LOST}: {why}" if why else ENGINE_LOST)
        recovered = self._come_together(started)
        self._log(recovered, f"engine_life={self._life.number}")
        return recovered

    def _begin(self, reason: str, lost: RankLostError | None = None) -> None:
        self._reason = reason
        self._lost_reasons = {} if lost is None else {lost.rank: lost}
        self._around.recovers_from(reason)

    @property
    def reason(self) -> str:
        """Of the break, and what the launcher has said since of who is lost."""
        later = (str(lost) for lost in self._lost_reasons.values())
        return "; ".join([self._reason, *(text for text in later if text not in self._reason)])

    def _come_together(self, started: float) -> Recovered:
        orders = _Orders(self._clock() + SILENCE_SECONDS)
        ready = self._gather(orders, started + self._limit_seconds)
        expected = replace(self._identity, model_fingerprint=self._engine.weights.fingerprint)
        unknown = self._workers.take_group(ready, expected)
        lost = self._engine.lose_ranks(unknown)
        new = [int(rank) for rank in unknown if not orders.kept(rank)]
        recovered = Recovered(
            generation=self._generation,
            reason=self.reason,
            seconds=self._clock() - started,
            new_ranks=new,
            kept_ranks=[rank for rank in range(self._identity.ep_size) if rank not in new],
            lost=lost,
        )
        self.last = recovered.report
        return recovered

    def _log(self, recovered: Recovered, rest: str) -> None:
        _LOG.warning(
            "recovered generation=%d seconds=%.1f new_ranks=%r kept_ranks=%r %s reason=%r",
            recovered.generation,
            recovered.seconds,
            recovered.new_ranks,
            recovered.kept_ranks,
            rest,
            recovered.reason,
        )

    def _named(self, error: CellError) -> CellError:
        """After a broken exchange the launcher gets a moment to name the rank that really died."""
        deadline = self._clock() + BLAME_SECONDS
        while isinstance(error, GroupBrokenError) and self._clock() < deadline:
            try:
                self._workers.receive(deadline)
            except RankLostError as lost:
                return lost
        return error

    def _count(self, error: CellError) -> None:
        if self._engine.num_steps != self._num_steps_at_last:
            self._num_in_a_row = 0
        self._num_steps_at_last = self._engine.num_steps
        self._num_in_a_row += 1
        if self._num_in_a_row > MAX_IN_A_ROW and self._engine.has_work:
            raise CellError(
                f"{error}; the {self._num_in_a_row}th time in a row without a step in between: what "
                "was to be computed may be what breaks it"
            )

    def _ask(self, reason: str, silent_ranks: Sequence[int] = ()) -> None:
        self._around.ask_for_group(GroupWanted(self._generation, list(silent_ranks), reason))

    def _gather(self, orders: _Orders, deadline: float) -> list[WorkerReady]:
        """Of every rank, by rank, in one group."""
        began = self._generation
        ready: dict[int, WorkerReady] = {}
        """Each rank's last word; that of a new process may come before the launcher's."""
        while self._generation == began or self._missing(ready):
            now = self._clock()
            if now > deadline:
                raise DeadlineError(
                    f"{self.reason}; not made good within {self._limit_seconds:g} s (--recovery-limit): "
                    + self._what_is_missing(began, ready)
                )
            newest = self._around.regroup
            if newest is not None and newest.generation > self._generation:
                self._generation = newest.generation
                orders.begin(newest, now)
            elif orders.are_silent(now) and self._generation != began:
                self._ask("ranks have not joined", self._missing(ready))
            orders.untold = self._tell_to_join(orders, deadline - now)
            message = self._receive(now + POLL_SECONDS)
            if isinstance(message, WorkerReady):
                ready[message.rank] = message
            elif (
                isinstance(message, GroupBroken) and began < message.generation == self._generation
            ):
                self._ask(str(GroupBrokenError(message.rank, message.reason)))
        return [ready[rank] for rank in range(self._identity.ep_size)]

    def _tell_to_join(self, orders: "_Orders", timeout_seconds: float) -> dict[int, int]:
        """Those who could not be told."""
        group = orders.group
        if group is None or not orders.untold:
            return {}
        where = group.generation, group.store_address, group.store_port
        weights = self._engine.weights.fingerprint
        message = JoinGroup(*where, timeout_seconds, self._life.number, weights)
        return self._workers.tell_to_join(orders.untold, message)

    def _receive(self, deadline: float) -> ToEngineFromWorker | None:
        try:
            return self._workers.receive(deadline)
        except RankLostError as lost:
            _LOG.warning("rank lost rank=%d reason=%r", lost.rank, lost.reason)
            self._lost_reasons[lost.rank] = lost
            self._around.recovers_from(self.reason)
            return None  # whoever said so will say where the others and a new process meet

    def _missing(self, ready: dict[int, WorkerReady]) -> list[int]:
        return [
            rank
            for rank in range(self._identity.ep_size)
            if rank not in ready or ready[rank].generation != self._generation
        ]

    def _what_is_missing(self, began: int, ready: dict[int, WorkerReady]) -> str:
        if self._generation == began and self._lost_reasons:
            lost = ", ".join(map(str, sorted(self._lost_reasons)))
            return f"rank {lost} did not come back"
        if self._generation == began:
            return "the launcher has not brought the ranks together"
        missing = ", ".join(map(str, self._missing(ready)))
        return f"rank {missing} did not join group {self._generation}"
