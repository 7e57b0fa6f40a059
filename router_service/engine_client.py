"""An HTTP server's side of the conversation with the engine: answers and queries. asyncio, used from one event loop.

An engine that is lost ends no answer: each is held until the engine is there again, and asked for again from where it
stood, as far as `to_engine.open_answers` lets it.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from cluster.channel_keys import PeerKeys
from cluster.errors import CellError, DeadlineError, OverloadedError, PointsmanError, RequestError
from cluster.log import logger
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
    WeightsUpdated,
)
from cluster.types import EvictTarget, Running
from router_service.to_engine.link import EngineLink
from router_service.to_engine.open_answer import OpenAnswer
from router_service.to_engine.open_answers import OpenAnswers
from router_service.to_engine.queries import A, Queries
from router_service.to_engine.seeds import with_seeds

OUTAGE_POLL_SECONDS = 0.2
"""How often an engine that came back is asked whether it goes on, and what it refused is submitted again."""
OUTAGE_STATUS_SECONDS = 1.0
"""It answers within this."""

_REFUSALS: dict[str, type[RequestError]] = {"overloaded": OverloadedError, "invalid": RequestError}
_LOST = "the engine is lost and is started again: try again in a moment"
_LOG = logger("http")


class EngineClient:
    """`close` is the release of everything that the constructor and `start` acquire."""

    def __init__(
        self,
        endpoint: str,
        identity: str,
        *,
        keys: PeerKeys | None = None,
        query_seconds: float = 10.0,
        silence_seconds: float = 120.0,
        weight_update_seconds: float = 1200.0,
        outage_seconds: float = 300.0,
    ) -> None:
        """keys: None only where the engine is on this host and has none either.
        query_seconds: deadline of metrics, status, evict and features queries.
        silence_seconds: with requests open, the engine counts as silent after this long without any frame from it,
        status answers included.
        weight_update_seconds: deadline of an update of the weights.
        outage_seconds: see OpenAnswers."""
        self._endpoint = endpoint
        self._query_seconds = query_seconds
        self._silence_seconds = silence_seconds
        self._weight_update_seconds = weight_update_seconds
        self._link = EngineLink(endpoint, identity, keys, self)
        self._answers = OpenAnswers(outage_seconds)
        self._queries = Queries(self._link.send, endpoint)
        self._failure: PointsmanError | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connects; needs the running event loop."""
        self._link.start()

    def fail(self, error: PointsmanError) -> None:
        """Ends every open answer and query with `error` and refuses later ones."""
        self._failure = error
        self._answers.fail(error)
        self._queries.fail(error)

    async def close(self) -> None:
        """Aborts that are still queued get a moment to leave."""
        self.fail(self._failure or CellError("the server is stopping"))
        for task in (self._watcher, self._keeper):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        await self._link.close()

    # --- answers

    async def generate(self, submits: Sequence[Submit]) -> AsyncGenerator[OutputDelta, None]:
        """Deltas of all these requests in the order they are made, until each has its completion. The engine takes
        all of them or none; a leader comes before those who follow it.

        Close the generator when leaving early (contextlib.aclosing): what has no completion yet is aborted.
        Raises OverloadedError, RequestError, CellError (also when too many deltas were not taken), DeadlineError.
        """
        self._check_open()
        seeded = with_seeds(submits, lambda: secrets.randbits(63))
        answer = OpenAnswer(seeded)
        self._answers.open(answer)
        self._watch_silence()
        unread = {submit.request_id for submit in submits}
        try:
            await self._link.send(SubmitAll(seeded))
            while unread:
                outcome = await answer.outcomes.get()
                if isinstance(outcome, PointsmanError):
                    raise outcome
                if isinstance(outcome, Refused):
                    raise _refusal(outcome)
                if outcome.completion is not None:
                    unread.discard(outcome.request_id)
                yield outcome
        finally:
            for request_id in self._answers.close(answer):
                with suppress(CellError):  # an engine that cannot be reached has nothing to abort
                    await self._link.send(Abort(request_id))

    async def finish(self, request_id: str, num_output_tokens: int) -> None:
        """A stop string was completed by this output token (1-based); the completion still comes."""
        id_at_engine = self._answers.finish(request_id, num_output_tokens)
        if id_at_engine is not None:
            await self._link.send(Finish(id_at_engine, num_output_tokens))

    # --- queries

    async def metrics(self) -> bytes:
        """Raises CellError, DeadlineError."""
        return (await self._ask(MetricsQuery, MetricsText)).text

    async def status(self, seconds: float | None = None) -> CellStatus:
        """Raises CellError, DeadlineError."""
        return await self._ask(StatusQuery, CellStatus, seconds)

    async def evict(self, part: EvictTarget) -> EvictReport:
        """Raises CellError, DeadlineError."""
        return await self._ask(lambda query_id: EvictCommand(query_id, part), EvictReport)

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
        )
        return report.features

    async def update_weights(self, model_dir: str, running: Running) -> WeightsUpdated:
        """Returns when all ranks serve them. Raises RequestError for a directory that cannot be served, ConflictError
        while another update is under way, CellError and DeadlineError."""
        return await self._ask(
            lambda query_id: UpdateWeights(query_id, model_dir, running),
            WeightsUpdated,
            self._weight_update_seconds,
        )

    async def _ask(
        self, question: Callable[[int], ToEngine], kind: type[A], seconds: float | None = None
    ) -> A:
        self._check_open()
        return await self._queries.ask(question, kind, seconds or self._query_seconds)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._link.is_lost:
            raise CellError(_LOST)

    # --- what the link says (`to_engine.link.LinkUser`)

    def take(self, message: ToHttpServer) -> None:
        match message:
            case OutputBatch(deltas):
                for delta in deltas:
                    self._answers.take(delta, _now())
            case Refused():
                self._answers.take(message, _now())
                self._keep_held()
            case _:
                self._queries.take(message)

    def lost(self) -> None:
        self._queries.fail(CellError("the engine was lost before it answered"))
        self._answers.lose(_now())
        _LOG.warning("engine lost held=%d", self._answers.num_held)
        self._keep_held()

    async def back(self) -> None:
        """As another process it knows nothing of what was; as the same one it is told to drop that."""
        _LOG.warning("engine back held=%d", self._answers.num_held)
        with suppress(CellError):  # what cannot be sent waits for its deadline
            for request_id in self._answers.take_stale_ids():
                await self._link.send(Abort(request_id))
            await self._submit_waiting()

    # --- while answers are held

    def _keep_held(self) -> None:
        if self._answers.num_held and (self._keeper is None or self._keeper.done()):
            self._keeper = asyncio.create_task(self._keep())

    async def _submit_waiting(self) -> None:
        for answer in self._answers.waiting():
            await self._link.send(SubmitAll(self._answers.rest_of(answer)))

    async def _keep(self) -> None:
        while self._answers.num_held:
            await asyncio.sleep(OUTAGE_POLL_SECONDS)
            self._answers.expire(_now())
            if self._link.is_lost:
                continue
            with suppress(CellError):
                await self._submit_waiting()
                if (await self.status(OUTAGE_STATUS_SECONDS)).ready:
                    self._answers.serve()

    # --- a silent engine: with requests open, status queries keep the line alive and a deadline ends the wait

    def _watch_silence(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._link.note_sign_of_life()
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while len(self._answers) and self._failure is None:
            await asyncio.sleep(self._silence_seconds / 4)
            silence = _now() - self._link.last_frame_seconds
            if self._link.is_lost:
                continue
            if silence >= self._silence_seconds:
                self._give_up(silence)
            elif silence >= self._silence_seconds / 4:
                with suppress(CellError):
                    await self._link.send(StatusQuery(0))

    def _give_up(self, silence: float) -> None:
        """On the open answers only: the engine may come back."""
        self._answers.fail(
            DeadlineError(f"no word from the engine at {self._endpoint} for {silence:.0f} s")
        )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _refusal(refused: Refused) -> PointsmanError:
    kind = _REFUSALS.get(refused.kind)
    return CellError(refused.reason) if kind is None else kind(refused.reason, field=refused.field)
