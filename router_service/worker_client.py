"""The expert workers over ZeroMQ: one frame per message, routes on a second socket. Implements `clients.Workers`
and `weight_update.WeightRanks`.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import zmq
from msgspec.structs import asdict

from cluster.channel import PullSocket, RouterSocket
from cluster.errors import CellError, DeadlineError, GroupBrokenError, RankLostError
from cluster.log import logger
from cluster.rank_place import RankPlace
from cluster.types import Rank
from cluster.wire import Decoder, encode
from cluster.worker_messages import (
    CellIdentity,
    CommitWeights,
    DiscardWeights,
    GroupBroken,
    JoinGroup,
    LateFrame,
    MeasureWeights,
    PlanPart,
    PlansHeld,
    PrepareWeights,
    RouteChunk,
    SequenceEnd,
    SequenceStart,
    StepDescriptor,
    StepResult,
    ToEngineFromWorker,
    WeightsCommitted,
    WeightsMeasured,
    WeightsPrepared,
    WorkerFailed,
    WorkerReady,
    WorkerStop,
)
from router_service.rank_peers import RankPeers
from router_service.step_clock import StepClock

_LOG = logger("workers")
A = TypeVar("A", StepResult, WeightsMeasured, WeightsPrepared, WeightsCommitted)


class WorkerClient:
    """Owner of both sockets to the workers. One thread.

    `clients` is the engine's socket to HTTP servers and the launcher: while a step runs, its messages are taken by
    `on_client_message`, which raises RankLostError when the launcher reports a death.
    """

    def __init__(
        self,
        *,
        identity: CellIdentity,
        workers: RouterSocket,
        routes: PullSocket,
        clients: RouterSocket,
        on_client_message: Callable[[], None],
        clock: StepClock,
    ) -> None:
        self._identity = identity
        self._num_ranks = identity.ep_size
        self._workers = workers
        self._routes = routes
        self._on_client_message = on_client_message
        self._clock = clock
        self._decoder: Decoder[ToEngineFromWorker] = Decoder(ToEngineFromWorker)
        self._frame_decoder: Decoder[LateFrame] = Decoder(LateFrame)
        self._client_socket = clients.socket
        self._peers = RankPeers()
        self._incarnations: dict[int, str] = {}
        self._places: dict[int, RankPlace] = {}
        self._held: list[PlansHeld] = []
        self._unreachable: dict[int, str] = {}
        """Ranks that something could not be sent to, since the last group came together."""
        self._poller = zmq.Poller()
        self._route_poller = zmq.Poller()
        for poller in (self._poller, self._route_poller):
            poller.register(workers.socket, zmq.POLLIN)
            poller.register(self._client_socket, zmq.POLLIN)
        self._route_poller.register(routes.socket, zmq.POLLIN)

    @property
    def places(self) -> list[RankPlace]:
        """By rank; empty until all have reported."""
        return [place for _, place in sorted(self._places.items())]

    # --- start and stop

    def wait_until_ready(self, timeout_seconds: float) -> list[WorkerReady]:
        """Raises DeadlineError naming the ranks that did not report, RankLostError for one that failed, CellError when
        a rank is not what this cell is made of."""
        ready: dict[int, WorkerReady] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(ready) < self._num_ranks:
            message = self.receive(deadline)
            if message is None:
                missing = [r for r in range(self._num_ranks) if r not in ready]
                raise DeadlineError(
                    f"rank {', '.join(map(str, missing))} did not start within {timeout_seconds:.0f} s "
                    "(cell.start_timeout_seconds)"
                )
            if isinstance(message, WorkerFailed):
                raise RankLostError(message.rank, message.reason)
            if isinstance(message, WorkerReady):
                ready[message.rank] = message
        by_rank = [ready[rank] for rank in range(self._num_ranks)]
        self.take_group(by_rank, self._identity)
        return by_rank

    def take_group(self, ready: list[WorkerReady], expected: CellIdentity) -> list[Rank]:
        """From now on these processes, by rank, are the ranks. Returns those ranks whose process is a new one.

        Raises one CellError that names every new rank, field and pair of values that differ from what is expected.
        """
        new = [m for m in ready if self._incarnations.get(m.rank) != m.incarnation]
        wanted = asdict(expected)
        differences = [
            f"rank {message.rank} has {field} {value!r}, the engine expects {wanted[field]!r}"
            for message in new
            for field, value in asdict(message.identity).items()
            if value != wanted[field]
        ]
        if differences:
            raise CellError("; ".join(differences))
        self._incarnations = {message.rank: message.incarnation for message in ready}
        self._places = {message.rank: message.place for message in ready}
        self._unreachable.clear()
        return [Rank(message.rank) for message in new]

    def tell_to_join(self, ranks: Mapping[int, int], message: JoinGroup) -> dict[int, int]:
        """Of `Regroup`. Returns those that cannot be told: they are lost, or have not come to this engine yet."""
        self._peers.know(ranks)
        frame = encode(message)
        return {rank: came for rank, came in ranks.items() if not self._reaches(rank, frame)}

    def stop(self) -> None:
        """Asks every reachable worker to leave; a dead one is skipped."""
        frame = encode(WorkerStop())
        for rank in range(self._num_ranks):
            self._reaches(rank, frame)  # or it is gone already, which is what was asked

    def take_failure(self) -> None:
        """Between steps a worker speaks only to acknowledge, or to say that it failed. Raises RankLostError or
        GroupBrokenError then."""
        while (message := self._next()) is not None:
            _raise_failure(message)
            if isinstance(message, PlansHeld):
                self._note_held(message)

    # --- clients.Workers

    def start_sequence(self, rank: Rank, start: SequenceStart) -> None:
        self._send(rank, encode(start))

    def end_sequences(self, rank: Rank, seq_ids: list[int]) -> None:
        self._send(rank, encode(SequenceEnd(seq_ids)))

    def send_routes(self, rank: Rank, chunk: RouteChunk) -> None:
        self._send(rank, encode(chunk))

    def send_plan(self, rank: Rank, part: PlanPart) -> None:
        self._send(rank, encode(part))

    def plans_held(self, timeout_seconds: float) -> list[PlansHeld]:
        """What the present process of each rank has acknowledged since the last call."""
        self._require_reachable()
        self.take_failure()
        if timeout_seconds and not self._held:
            events = dict(self._poller.poll(int(timeout_seconds * 1000) + 1))
            if self._client_socket in events:
                self._on_client_message()
            self.take_failure()
        held, self._held = self._held, []
        return held

    def execute(self, step: StepDescriptor) -> list[StepResult]:
        self._send_all(encode(step))
        busiest = max(
            (int(step.num_tokens[step.ranks == rank].sum()) for rank in range(self._num_ranks)),
            default=0,
        )
        started = time.monotonic()
        results = self._gather(step.step_id, started, self._clock.deadline(busiest))
        self._clock.observe(busiest, time.monotonic() - started)
        return results

    def frames(self, timeout_seconds: float) -> list[LateFrame]:
        if timeout_seconds:
            self._await_routes(timeout_seconds)
        frames = []
        while (data := self._routes.receive(0.0)) is not None:
            frames.append(self._frame_decoder.decode(data))
        return frames

    # --- weight_update.WeightRanks

    def measure_weights(
        self, message: MeasureWeights, timeout_seconds: float
    ) -> list[WeightsMeasured]:
        self._send_all(encode(message))
        return self._answers(
            WeightsMeasured,
            lambda answer: answer.update_id == message.update_id,
            time.monotonic() + timeout_seconds,
            f"did not look at the weights within {timeout_seconds:g} s (cell.start_timeout_seconds)",
        )

    def prepare_weights(
        self, message: PrepareWeights, timeout_seconds: float
    ) -> list[WeightsPrepared]:
        self._send_all(encode(message))
        return self._answers(
            WeightsPrepared,
            lambda answer: answer.update_id == message.update_id,
            time.monotonic() + timeout_seconds,
            f"did not read its weights within {timeout_seconds:g} s (cell.start_timeout_seconds)",
        )

    def commit_weights(self, message: CommitWeights, timeout_seconds: float) -> None:
        self._send_all(encode(message))
        self._answers(
            WeightsCommitted,
            lambda answer: answer.update_id == message.update_id,
            time.monotonic() + timeout_seconds,
            f"did not take its weights within {timeout_seconds:g} s (cell.start_timeout_seconds)",
        )

    def discard_weights(self) -> None:
        self._send_all(encode(DiscardWeights()))

    # --- waiting

    def _note_held(self, message: PlansHeld) -> None:
        if self._incarnations.get(message.rank) == message.incarnation:
            self._held.append(message)

    def _reaches(self, rank: int, frame: bytes) -> bool:
        try:
            self._workers.send(self._peers.name(rank), frame)
        except CellError:
            return False
        return True

    def _send(self, rank: Rank, frame: bytes) -> None:
        """That a rank is gone is found out where an answer is waited for, and not in the middle of what goes before."""
        try:
            self._workers.send(self._peers.name(rank), frame)
        except CellError as error:
            self._unreachable.setdefault(rank, str(error))

    def _send_all(self, frame: bytes) -> None:
        for rank in range(self._num_ranks):
            self._send(Rank(rank), frame)
        self._require_reachable()

    def _require_reachable(self) -> None:
        for rank, reason in self._unreachable.items():
            raise RankLostError(rank, reason)

    def _await_routes(self, timeout_seconds: float) -> None:
        """Until a frame is there or the timeout has passed. Serves clients; raises when a rank fails meanwhile."""
        self._require_reachable()
        deadline = time.monotonic() + timeout_seconds
        while (remaining := deadline - time.monotonic()) > 0:
            events = dict(self._route_poller.poll(int(remaining * 1000) + 1))
            if self._routes.socket in events:
                return
            if self._client_socket in events:
                self._on_client_message()
            if self._workers.socket in events:
                self.take_failure()

    def _gather(self, step_id: int, started: float, limit_seconds: float) -> list[StepResult]:
        return self._answers(
            StepResult,
            lambda result: result.step_id == step_id,
            started + limit_seconds,
            f"did not answer step {step_id} within {limit_seconds:.1f} s "
            "(cell.step_timeout_factor × the predicted time)",
        )

    def _answers(
        self, kind: type[A], is_meant: Callable[[A], bool], deadline: float, what_is_late: str
    ) -> list[A]:
        """One of each rank, by rank. Raises DeadlineError that says of the missing ranks `what_is_late`, RankLostError
        for one that failed, GroupBrokenError."""
        answers: dict[int, A] = {}
        while len(answers) < self._num_ranks:
            message = self.receive(deadline)
            if message is None:
                missing = [r for r in range(self._num_ranks) if r not in answers]
                raise DeadlineError(
                    f"rank {', '.join(map(str, missing))} {what_is_late}",
                    silent_ranks=tuple(missing),
                )
            _raise_failure(message)
            if isinstance(message, kind) and is_meant(message):
                answers[message.rank] = message
        return [answers[rank] for rank in range(self._num_ranks)]

    def receive(self, deadline: float) -> ToEngineFromWorker | None:
        """The next message of any worker, or None once the deadline has passed. Serves clients meanwhile.

        An answer that is there counts also when this process woke up too late to take it in time.
        """
        while True:
            message = self._next()
            if isinstance(message, PlansHeld):
                self._note_held(message)
                continue
            if message is not None:
                return message
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            events = dict(self._poller.poll(int(remaining * 1000) + 1))
            if self._client_socket in events:
                self._on_client_message()

    def _next(self) -> ToEngineFromWorker | None:
        """Of the ranks' processes; one that was replaced and is still there is told to end. Does not wait."""
        while (received := self._workers.receive(0.0)) is not None:
            peer, frame = received
            if self._peers.takes(peer):
                return self._decoder.decode(frame)
            _LOG.warning("message of a replaced process dropped peer=%r", peer)
            with contextlib.suppress(CellError):
                self._workers.send(peer, encode(WorkerStop()))
        return None


def _raise_failure(message: ToEngineFromWorker) -> None:
    if isinstance(message, WorkerFailed):
        raise RankLostError(message.rank, message.reason)
    if isinstance(message, GroupBroken):
        raise GroupBrokenError(message.rank, message.reason)
