"""The engine as a process: its sockets, its loop, its answers. Everything that decides is in `engine`.

One thread. While a step runs on the workers, messages from HTTP servers are taken and queries answered; what changes
the request sets waits for the end of the step.
"""

import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import zmq
from prometheus_client import CollectorRegistry

from cluster.config import Config
from cluster.errors import CellError, OverloadedError, RankLostError, RequestError, WireError
from cluster.log import logger
from cluster.messages import (
    Abort,
    EvictCommand,
    FeaturesCommand,
    FeaturesReport,
    Finish,
    GroupWanted,
    MetricsQuery,
    MetricsText,
    RankLost,
    Regroup,
    StatusQuery,
    Stop,
    Submit,
    SubmitAll,
    ToEngine,
    UpdateWeights,
    Watching,
    WeightsRefused,
    WeightsServed,
    WeightsUpdated,
)
from cluster.metrics import Metrics
from cluster.wire import Decoder
from cluster.worker_messages import CellIdentity
from router_service.cell_report import count_recovery, refresh_gauges, status_of
from router_service.clients import PrefixStore
from router_service.engine_composition import ServedShapes, Surroundings, compose_engine
from router_service.engine_post import EnginePost
from router_service.engine_sockets import EngineAddress, EngineSockets, largest_frame
from router_service.eviction import evict
from router_service.fragment_pool import PlanCompiler
from router_service.recovery import Recovery
from router_service.served_checkpoint import WeightSource
from router_service.step_clock import StepClock
from router_service.step_metrics import StepMetrics
from router_service.weight_update import WeightUpdate
from router_service.worker_client import WorkerClient

IDLE_CHECK_SECONDS = 1.0
"""After so long without work the store checks its invariants, once per busy period."""
FAREWELL_SECONDS = 5.0
"""How long a cell that failed still answers, so that every client reads its error."""
STATE_SECONDS = 1.0
"""How long the end waits for the disk to have what was published."""

STARTING = "starting"

_LOG = logger("engine")


_Command = SubmitAll | Abort | Finish | EvictCommand | FeaturesCommand | UpdateWeights
"""What waits for the end of the step."""


class _StopAsked(Exception):
    """Stop came while no step could run: at the start, or while the cell was paused."""


class EngineService:
    """Owner of the engine, its sockets and its state of health."""

    def __init__(
        self,
        config: Config,
        identity: CellIdentity,
        shapes: ServedShapes,
        *,
        store: PrefixStore,
        compiler: PlanCompiler,
        checkpoint: WeightSource,
        address: EngineAddress,
    ) -> None:
        """Raises CellError where a port of the address cannot be taken."""
        life = self._life = address.life
        self._identity = identity
        self._config = config
        self._store = store
        self._compiler = compiler
        self._metrics = Metrics(CollectorRegistry())
        self._sockets = EngineSockets(
            address,
            max_frame_bytes=largest_frame(config, shapes.route_shape),
            refusals=self._metrics.channel_refusals,
        )
        self.client_endpoint = self._sockets.client_endpoint
        self.worker_endpoint = self._sockets.worker_endpoint
        self.route_endpoint = self._sockets.route_endpoint
        self._client_socket = self._sockets.clients
        self._worker_socket = self._sockets.workers
        self._post = EnginePost(self._client_socket)
        self._decoder: Decoder[ToEngine] = Decoder(ToEngine)
        self._commands: deque[tuple[bytes, _Command]] = deque()
        """Bounded: submits by `_take_submits`, the rest by what there is to end and by whom waits for an answer."""
        self._num_queued_submits = 0
        self._not_ready = STARTING
        self._stopping: str | None = None
        self.has_update = False
        """An update of the weights waits or is under way."""
        self._paused = ""
        """Why no step runs just now."""
        cell = config.cell
        self._workers = WorkerClient(
            identity=identity,
            workers=self._worker_socket,
            routes=self._sockets.routes,
            clients=self._client_socket,
            on_client_message=self._take_client_messages,
            clock=StepClock(cell.step_timeout_factor, cell.step_timeout_floor_seconds),
        )
        around = Surroundings(
            store=store,
            compiler=compiler,
            workers=self._workers,
            observer=StepMetrics(self._metrics, identity.dispatch),
            draw_seed=lambda: secrets.randbits(63),
        )
        self._engine = compose_engine(config, identity, shapes, around, life.first_step)
        self.regroup: Regroup | None = None
        """See `recovery.RecoverySurroundings`."""
        self._recovery = Recovery(
            self._engine,
            self._workers,
            self,
            identity,
            limit_seconds=cell.recovery_limit_seconds,
            life=life,
        )
        self._weight_update = WeightUpdate(
            self._engine,
            self._workers,
            checkpoint,
            self,
            timeout_seconds=cell.start_timeout_seconds,
        )

    # --- the loop

    def run(self) -> str | None:
        """Serves until Stop (returns None) or until the cell fails (returns why).

        Queries are answered from the first moment on, "starting" included. Whatever ends the loop, every open request
        gets its error first. What is nobody's fault but the engine's own is raised, and told to nobody where another
        engine will come.
        """
        try:
            failure = self._run()
        except Exception as error:
            if self._config.cell.recovery_limit_seconds:
                self._store.close(STATE_SECONDS)
                self._sockets.close_after_sending(0.0)
                raise  # another engine will be in its place, for which HTTP servers hold their streams
            self._end(f"the engine failed: {type(error).__name__}: {error}")
            raise
        self._end(failure)
        return failure

    def _run(self) -> str | None:
        try:
            self._gather_ranks()
            _LOG.info("ready ranks=%d dispatch=%s", self._identity.ep_size, self._identity.dispatch)
            self._serve()
        except _StopAsked:
            return None
        except CellError as error:
            return str(error)
        return None

    def _gather_ranks(self) -> None:
        if self._life.number:
            self._not_ready = ""  # requests may come, and wait as in any recovery
            with self._pause("recovering"):
                recovered = self._recovery.come_back()
            count_recovery(self._metrics, recovered)
            return
        self._workers.wait_until_ready(self._config.cell.start_timeout_seconds)
        self._not_ready = ""

    def _serve(self) -> None:
        while self._stopping is None:
            try:
                self._serve_unbroken()
            except CellError as error:
                self.recover(error)

    def _serve_unbroken(self) -> None:
        checked = True
        while self._stopping is None:
            upkeep_seconds = self._store.upkeep()
            if self._engine.has_work or self._commands:
                checked = False
                self._take_client_messages()
                self._run_commands()
                if self._engine.has_work:
                    self._engine.step()
                self._post.ship(self._engine)
            elif upkeep_seconds is not None:
                self._wait_for_client_message(upkeep_seconds)
            elif not self._wait_for_client_message(None if checked else IDLE_CHECK_SECONDS):
                self._engine.check_invariants()
                checked = True

    # --- when the ranks cannot exchange any more

    def recover(self, error: CellError) -> None:
        self._post.ship(self._engine)
        with self._pause(f"recovering: {error}"):
            recovered = self._recovery.run(error)
        count_recovery(self._metrics, recovered)
        self._post.ship(self._engine)

    @contextmanager
    def _pause(self, reason: str) -> Iterator[None]:
        self._paused = reason
        try:
            yield
        finally:
            self._paused = ""

    def ask_for_group(self, wanted: GroupWanted) -> None:
        """See `recovery.RecoverySurroundings`."""
        self._post.tell_launcher(wanted)

    def recovers_from(self, reason: str) -> None:
        """See `recovery.RecoverySurroundings`."""
        self._paused = f"recovering: {reason}"

    def _wait_for_client_message(self, timeout_seconds: float | None) -> bool:
        """Sleeps until a message is there (True) or the timeout has passed. A worker may fail while idle."""
        poller = zmq.Poller()
        poller.register(self._client_socket.socket, zmq.POLLIN)
        poller.register(self._worker_socket.socket, zmq.POLLIN)
        timeout = None if timeout_seconds is None else int(timeout_seconds * 1000)
        events = dict(poller.poll(timeout))
        if self._worker_socket.socket in events:
            self._workers.take_failure()
        self._take_client_messages()
        return bool(events)

    def _end(self, failure: str | None) -> None:
        reason = failure or f"the server is stopping: {self._stopping}"
        self._not_ready = reason
        try:
            self._engine.fail_all(reason)
        finally:
            self._post.ship(self._engine)
            if failure is not None:
                _LOG.error("cell failed reason=%r", failure)
            self._answer_for(0.0 if failure is None else FAREWELL_SECONDS)
            self._workers.stop()
            self._store.close(STATE_SECONDS)
            self._sockets.close_after_sending(1.0)

    def _answer_for(self, seconds: float) -> None:
        """Answers what has arrived already and what still does; Stop ends the wait."""
        deadline = time.monotonic() + seconds
        self._run_commands()
        while (received := self._client_socket.receive(self._remaining(deadline))) is not None:
            self._take(*received, may_raise=False)
            self._run_commands()

    def _remaining(self, deadline: float) -> float:
        return 0.0 if self._stopping is not None else max(0.0, deadline - time.monotonic())

    # --- messages from HTTP servers and the launcher

    def _take_client_messages(self) -> None:
        """Takes all that has arrived. Raises RankLostError when the launcher reports a death, and while starting
        refuses what needs a step at once."""
        while (received := self._client_socket.receive(0.0)) is not None:
            self._take(*received, may_raise=True)
        if self._not_ready:
            self._run_commands()

    def _take(self, peer: bytes, frame: bytes, *, may_raise: bool) -> None:
        try:
            message = self._decoder.decode(frame)
        except WireError as error:
            _LOG.warning("message refused peer=%r reason=%s", peer, error)
            return
        match message:
            case SubmitAll(submits):
                self._take_submits(peer, message, submits)
            case Abort() | Finish() | EvictCommand() | FeaturesCommand():
                self._commands.append((peer, message))
            case UpdateWeights():
                self._take_update(peer, message)
            case MetricsQuery(query_id):
                refresh_gauges(self._metrics, self._engine, self._store.stats())
                self._post.send(peer, MetricsText(query_id, self._metrics.render()))
            case StatusQuery(query_id):
                reason = self._not_ready or self._paused
                about = self._identity, self._workers.places, self._engine, self._store.stats()
                last = self._recovery.last
                self._post.send(peer, status_of(query_id, reason, *about, last_recovery=last))
            case Stop() | RankLost() | Watching() | Regroup():
                self._take_from_launcher(peer, message, may_raise=may_raise)

    def _take_from_launcher(
        self, peer: bytes, message: Stop | RankLost | Watching | Regroup, *, may_raise: bool
    ) -> None:
        match message:
            case Stop(reason):
                self._stop(reason)
            case RankLost(rank, reason):
                if may_raise:
                    raise RankLostError(rank, reason)
            case Watching():
                self._post.launcher = peer
            case Regroup():
                self.regroup = message

    def _stop(self, reason: str) -> None:
        """At the end of the step; raises _StopAsked where none will end soon."""
        self._stopping = reason
        if self._not_ready == STARTING or self._paused:
            raise _StopAsked

    def _take_submits(self, peer: bytes, message: SubmitAll, submits: list[Submit]) -> None:
        """No more wait for the end of a step than may wait after it: the others are refused at once."""
        if self._not_ready:
            self._submit(peer, submits)
            return
        if submits[0].is_again:
            self._commands.append((peer, message))
            return
        try:
            self._engine.check_room(self._num_queued_submits, len(submits))
        except OverloadedError as error:
            self._post.refuse(peer, submits, error)
            return
        self._num_queued_submits += len(submits)
        self._commands.append((peer, message))

    def _run_commands(self) -> None:
        while self._commands:
            peer, command = self._commands.popleft()
            match command:
                case SubmitAll(submits):
                    if not submits[0].is_again:
                        self._num_queued_submits -= len(submits)
                    self._submit(peer, submits)
                case Abort(request_id):
                    self._engine.abort(peer, request_id)
                case Finish(request_id, num_output_tokens):
                    self._engine.finish(peer, request_id, num_output_tokens)
                case EvictCommand():
                    evict(command, self._engine, self._store, partial(self._post.send, peer))
                case FeaturesCommand(query_id):
                    self._switch(command)
                    self._post.send(peer, FeaturesReport(query_id, self._engine.features))
                case UpdateWeights():
                    self._update_weights(peer, command)

    def _switch(self, command: FeaturesCommand) -> None:
        before = self._engine.features
        self._engine.set_features(
            route_replay=command.route_replay,
            planned_dispatch=command.planned_dispatch,
            prefix_store=command.prefix_store,
        )
        if self._engine.features != before:
            _LOG.info("features %s", self._engine.features)

    # --- other weights

    def _take_update(self, peer: bytes, command: UpdateWeights) -> None:
        if self.has_update:
            reason = "another update of the weights is under way: wait for its answer"
            self._post.send(peer, WeightsRefused(command.query_id, "conflict", reason))
            return
        self.has_update = True
        self._commands.append((peer, command))

    def _update_weights(self, peer: bytes, command: UpdateWeights) -> None:
        """Whoever asked is answered, also when the cell fails at it."""
        answer: WeightsUpdated | WeightsRefused
        try:
            with self._pause(f"weights are read from {command.model_dir}"):
                if self._not_ready:
                    answer = WeightsRefused(command.query_id, "unavailable", self._not_ready)
                else:
                    answer = self._weight_update.run(command)
        except CellError as error:
            self._post.send(peer, WeightsRefused(command.query_id, "unavailable", str(error)))
            raise
        finally:
            self.has_update = False
        outcome = "refused"
        if isinstance(answer, WeightsUpdated):
            outcome = "updated"
        self._metrics.weight_updates.labels(outcome).inc()
        self._post.ship(self._engine)
        self._post.send(peer, answer)

    def serve(self, timeout_seconds: float) -> None:
        """See `weight_update.UpdateSurroundings`."""
        self._wait_for_client_message(timeout_seconds)

    def note_weights(self, served: WeightsServed) -> None:
        """See `weight_update.UpdateSurroundings`."""
        self._post.tell_launcher(served)

    def end_requests(self) -> None:
        """Those that the engine knows; all else keeps its place in the queue."""
        waiting = list(self._commands)
        self._commands.clear()
        for peer, command in waiting:
            match command:
                case Abort(request_id) if self._engine.has_request(peer, request_id):
                    self._engine.abort(peer, request_id)
                case Finish(request_id, num_tokens) if self._engine.has_request(peer, request_id):
                    self._engine.finish(peer, request_id, num_tokens)
                case _:
                    self._commands.append((peer, command))

    def _submit(self, peer: bytes, submits: list[Submit]) -> None:
        if self._not_ready:
            self._post.refuse(peer, submits, self._not_ready)
            return
        try:
            self._engine.submit(peer, *submits)
        except RequestError as error:
            self._post.refuse(peer, submits, error)
