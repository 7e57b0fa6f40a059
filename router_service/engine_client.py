"""An HTTP server's side of the conversation with the engine: submits, output streams, queries. asyncio, one socket.

The client owns the table of open requests. A request leaves the table when its last delta was taken, when it failed or
when its consumer left; in the last case the engine is told to abort it.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import zmq
import zmq.asyncio

from cluster.channel import QUEUE_BOUND, know_server
from cluster.channel_keys import PeerKeys
from cluster.errors import (
    CellError,
    ConflictError,
    DeadlineError,
    OverloadedError,
    PointsmanError,
    RequestError,
)
from cluster.messages import (
    Abort,
    CellStatus,
    EvictCommand,
    EvictReport,
    FeaturesCommand,
    FeaturesReport,
    FeatureStates,
    Finish,
    MetricsQuery,
    MetricsText,
    OutputBatch,
    OutputDelta,
    Refused,
    StatusQuery,
    Submit,
    SubmitAll,
    ToEngine,
    ToHttpServer,
    UpdateWeights,
    WeightsRefused,
    WeightsUpdated,
)
from cluster.types import EvictTarget, Running
from cluster.wire import Decoder, encode

MAX_UNREAD_DELTAS = 4096
"""Of one request: they wait for a client that reads slowly, or not at all until its connection is given up."""

_Outcome = OutputDelta | Refused | PointsmanError
_Answer = MetricsText | CellStatus | EvictReport | FeaturesReport | WeightsUpdated | WeightsRefused
_REFUSALS: dict[str, type[RequestError]] = {"overloaded": OverloadedError, "invalid": RequestError}
A = TypeVar("A", MetricsText, CellStatus, EvictReport, FeaturesReport, WeightsUpdated)
T = TypeVar("T")


class EngineClient:
    """Used from one event loop. `close` is the release of everything that the constructor and `start` acquire."""

    def __init__(
        self,
        endpoint: str,
        identity: str,
        *,
        keys: PeerKeys | None = None,
        query_seconds: float = 10.0,
        silence_seconds: float = 120.0,
        weight_update_seconds: float = 1200.0,
    ) -> None:
        """keys: None only where the engine is on this host and has none either.
        query_seconds: deadline of metrics, status, evict and features queries.
        silence_seconds: with requests open, the engine counts as lost after this long without any frame from it,
        status answers included.
        weight_update_seconds: deadline of an update of the weights."""
        self._endpoint = endpoint
        self._query_seconds = query_seconds
        self._silence_seconds = silence_seconds
        self._weight_update_seconds = weight_update_seconds
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        know_server(self._socket, keys, endpoint)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_BOUND)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_BOUND)
        self._decoder: Decoder[ToHttpServer] = Decoder(ToHttpServer)
        self._outputs: dict[str, asyncio.Queue[_Outcome]] = {}
        self._queries: dict[int, asyncio.Future[_Answer]] = {}
        self._query_ids = itertools.count(1)
        self._failure: PointsmanError | None = None
        self._last_frame_time = 0.0
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connects; needs the running event loop."""
        self._socket.connect(self._endpoint)
        self._reader = asyncio.create_task(self._read())

    def fail(self, error: PointsmanError) -> None:
        """Ends every open request and query with `error` and refuses later ones."""
        self._failure = error
        for queue in self._outputs.values():
            _put_last(queue, error)
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(error)

    async def close(self) -> None:
        """Aborts that are still queued get a moment to leave."""
        self.fail(self._failure or CellError("the server is stopping"))
        for task in (self._reader, self._watcher):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self._socket.close(linger=500)
        self._context.term()

    async def generate(self, submits: Sequence[Submit]) -> AsyncGenerator[OutputDelta, None]:
        """Deltas of all these requests in the order they are made, until each has its completion. The engine takes
        all of them or none; a leader comes before those who follow it.

        Close the generator when leaving early (contextlib.aclosing): what has no completion yet is aborted.
        Raises OverloadedError, RequestError, CellError (also when too many deltas were not taken), DeadlineError.
        """
        self._check_open()
        outcomes: asyncio.Queue[_Outcome] = asyncio.Queue(MAX_UNREAD_DELTAS * len(submits))
        open_ids = {submit.request_id for submit in submits}
        self._outputs.update(dict.fromkeys(open_ids, outcomes))
        self._watch_silence()
        try:
            await self._send(SubmitAll(list(submits)))
            while open_ids:
                outcome = await outcomes.get()
                if isinstance(outcome, PointsmanError):
                    raise outcome
                if isinstance(outcome, Refused):
                    open_ids.clear()
                    raise _refusal(outcome)
                if outcome.completion is not None:
                    open_ids.discard(outcome.request_id)
                yield outcome
        finally:
            for request_id in {submit.request_id for submit in submits}:
                self._outputs.pop(request_id, None)
            for request_id in open_ids:
                with suppress(CellError):  # an engine that cannot be reached has nothing to abort
                    await self._send(Abort(request_id))

    async def finish(self, request_id: str, num_output_tokens: int) -> None:
        """A stop string was completed by this output token (1-based); the completion still comes."""
        await self._send(Finish(request_id, num_output_tokens))

    async def metrics(self) -> bytes:
        """Raises CellError, DeadlineError."""
        return (await self._ask(MetricsQuery, MetricsText, self._query_seconds)).text

    async def status(self, seconds: float | None = None) -> CellStatus:
        """Raises CellError, DeadlineError."""
        return await self._ask(StatusQuery, CellStatus, seconds or self._query_seconds)

    async def evict(self, part: EvictTarget) -> EvictReport:
        """Raises CellError, DeadlineError."""
        return await self._ask(
            lambda query_id: EvictCommand(query_id, part), EvictReport, self._query_seconds
        )

    async def features(
        self,
        *,
        route_replay: bool | None = None,
        planned_dispatch: bool | None = None,
        prefix_store: bool | None = None,
    ) -> FeatureStates:
        """Switches those that are not None and returns all. Raises CellError, DeadlineError."""
        report = await self._ask(
            lambda query_id: FeaturesCommand(
                query_id, route_replay, planned_dispatch, prefix_store
            ),
            FeaturesReport,
            self._query_seconds,
        )
        return report.features

    async def update_weights(self, model_dir: str, running: Running) -> WeightsUpdated:
        """Returns when all ranks serve them. Raises RequestError for a directory that cannot be served, ConflictError
        while another update is under way, CellError and DeadlineError."""
        answer = await self._ask(
            lambda query_id: UpdateWeights(query_id, model_dir, running),
            WeightsUpdated,
            self._weight_update_seconds,
        )
        return answer

    async def _ask(self, question: Callable[[int], ToEngine], kind: type[A], seconds: float) -> A:
        self._check_open()
        query_id = next(self._query_ids)
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = answer
        try:
            await self._send(question(query_id))
            async with asyncio.timeout(seconds):
                result = await answer
        except TimeoutError as error:
            raise DeadlineError(
                f"the engine at {self._endpoint} did not answer within {seconds:g} s"
            ) from error
        finally:
            del self._queries[query_id]
        if isinstance(result, WeightsRefused):
            raise _weights_refusal(result)
        if not isinstance(result, kind):
            raise CellError(f"the engine answered query {query_id} with {type(result).__name__}")
        return result

    async def _send(self, message: ToEngine) -> None:
        """Completes at once: with DONTWAIT pyzmq never suspends, so this is safe while a task is being cancelled."""
        try:
            await self._socket.send(encode(message), zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise CellError(f"cannot send to the engine at {self._endpoint}: {error}") from error

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._socket.recv()
                self._last_frame_time = asyncio.get_running_loop().time()
                self._take(self._decoder.decode(frame))
                await asyncio.sleep(0)  # receiving what is there gives way to nobody
        except (PointsmanError, zmq.ZMQError) as error:
            self.fail(CellError(f"the engine at {self._endpoint} cannot be understood: {error}"))

    def _take(self, message: ToHttpServer) -> None:
        match message:
            case OutputBatch(deltas):
                for delta in deltas:
                    self._put(delta.request_id, delta)
            case Refused(request_id):
                self._put(request_id, message)
            case _:
                answer = self._queries.get(message.query_id)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _put(self, request_id: str, outcome: _Outcome) -> None:
        """A request that is not in the table was left by its consumer."""
        queue = self._outputs.get(request_id)
        if queue is None:
            return
        if not queue.full():
            queue.put_nowait(outcome)
            return
        self._outputs = {key: other for key, other in self._outputs.items() if other is not queue}
        num_unread = queue.qsize()
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(CellError(f"the client reads too slowly: {num_unread} deltas wait for it"))

    # A silent engine: with requests open, status queries keep the line alive and a deadline ends the wait.

    def _watch_silence(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._last_frame_time = asyncio.get_running_loop().time()
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while self._outputs and self._failure is None:
            await asyncio.sleep(self._silence_seconds / 4)
            silence = asyncio.get_running_loop().time() - self._last_frame_time
            if silence >= self._silence_seconds:
                self._lose(silence)
            elif silence >= self._silence_seconds / 4:
                with suppress(CellError):
                    await self._send(StatusQuery(0))

    def _lose(self, silence: float) -> None:
        """Ends the open requests only: the engine may come back."""
        error = DeadlineError(f"no word from the engine at {self._endpoint} for {silence:.0f} s")
        for queue in self._outputs.values():
            _put_last(queue, error)


def _put_last(queue: "asyncio.Queue[_Outcome]", error: PointsmanError) -> None:
    """In place of a delta where there is no room: whoever reads that far gets the error."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(error)


def _refusal(refused: Refused) -> PointsmanError:
    kind = _REFUSALS.get(refused.kind)
    return CellError(refused.reason) if kind is None else kind(refused.reason, field=refused.field)


def _weights_refusal(refused: WeightsRefused) -> PointsmanError:
    match refused.kind:
        case "invalid":
            return RequestError(refused.reason, field="model_dir")
        case "conflict":
            return ConflictError(refused.reason)
        case "unavailable":
            return CellError(refused.reason)


class SharedCall(Generic[T]):
    """Callers that arrive while a call is in flight wait for that one: a storm of probes is one query."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._call = call
        self._in_flight: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        if self._in_flight is None or self._in_flight.done():
            self._in_flight = asyncio.create_task(self._call())
        return await asyncio.shield(self._in_flight)
