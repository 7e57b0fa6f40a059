"""An expert worker behind its sockets: messages in order, answers back, one word before it ends in failure."""

import os
import secrets
from pathlib import Path

from cluster.channel import DealerSocket, PushSocket
from cluster.channel_keys import PeerKeys
from cluster.errors import CellError, CheckpointError
from cluster.rank_name import RankName
from cluster.rank_place import RankPlace
from cluster.wire import Decoder, encode
from cluster.worker_messages import (
    CommitWeights,
    DiscardWeights,
    GroupBroken,
    HeldPlan,
    JoinGroup,
    LoadFailure,
    MeasureWeights,
    PlanPart,
    PlansHeld,
    PrepareWeights,
    RouteChunk,
    SequenceEnd,
    SequenceStart,
    StepDescriptor,
    ToExchangeWeights,
    ToWorker,
    WeightsCommitted,
    WeightsMeasured,
    WeightsPrepared,
    WorkerFailed,
    WorkerReady,
    WorkerStop,
)
from expert_workers.exchange.base import ExchangeError
from expert_workers.worker import ExpertWorker, StepOutcome

LAST_WORD_SECONDS = 5.0
"""How long queued answers may take to leave once the loop has ended."""
NO_STEP = -1


def run_worker(
    worker: ExpertWorker,
    *,
    rank: int,
    place: RankPlace,
    engine_endpoint: str,
    route_endpoint: str,
    keys: PeerKeys | None = None,
    generation: int = 0,
    engine_life: int = 0,
) -> None:
    """Serves the engine until WorkerStop; the group has ended when this returns.

    keys: None only where the engine is on this host and has none either.
    generation: of the group that the worker has joined, the first of this process
    engine_life: of the engine that is there by now, see JoinGroup

    A broken exchange is told to the engine, and the worker waits for another group. Any other failure is told and then
    raised.
    """
    engine, routes = DealerSocket(str(RankName(rank, generation)), keys), PushSocket(keys)
    loop = _WorkerLoop(worker, rank, place, engine, routes, generation)
    loop.engine_life = engine_life
    try:
        engine.connect(engine_endpoint)
        routes.connect(route_endpoint)
        loop.run()
    except Exception as error:
        engine.send(encode(loop.failure(error)))
        raise
    finally:
        engine.close_after_sending(LAST_WORD_SECONDS)
        routes.close_after_sending(LAST_WORD_SECONDS)
        worker.close()


class _WorkerLoop:
    def __init__(
        self,
        worker: ExpertWorker,
        rank: int,
        place: RankPlace,
        engine: DealerSocket,
        routes: PushSocket,
        generation: int,
    ) -> None:
        self._worker = worker
        self._rank = rank
        self._place = place
        self._engine = engine
        self._routes = routes
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)
        self._generation = generation
        self.engine_life = 0
        """Whose words the worker knows."""
        self._step_id = NO_STEP
        self._incarnation = secrets.token_hex(8)

    def run(self) -> None:
        self._say_ready()
        while True:
            # Without a deadline: an idle cell costs nothing, and whoever started this process ends it.
            frame = self._engine.receive(None)
            if frame is not None and not self._handle(self._decoder.decode(frame)):
                return

    def failure(self, error: Exception) -> WorkerFailed:
        return WorkerFailed(self._rank, self._step_id, _first_line(error))

    def _say_ready(self) -> None:
        message = WorkerReady(
            rank=self._rank,
            pid=os.getpid(),
            identity=self._worker.identity,
            incarnation=self._incarnation,
            place=self._place,
            generation=self._generation,
        )
        self._engine.send(encode(message))

    def _handle(self, message: ToWorker) -> bool:
        """False once the loop shall end."""
        match message:
            case SequenceStart():
                self._worker.start_sequence(message)
            case SequenceEnd():
                self._worker.end_sequences(message.seq_ids)
            case RouteChunk():
                self._worker.add_route_chunk(message)
            case PlanPart():
                self._worker.add_plan_part(message)
                held = HeldPlan(message.fragment_id, message.digest)
                self._engine.send(encode(PlansHeld(self._rank, self._incarnation, [held])))
            case StepDescriptor():
                self._execute(message)
            case JoinGroup():
                self._join(message)
            case WorkerStop():
                return False
            case _:
                self._exchange_weights(message)
        return True

    def _exchange_weights(self, message: ToExchangeWeights) -> None:
        match message:
            case MeasureWeights():
                self._engine.send(encode(self._measure_weights(message)))
            case PrepareWeights():
                self._engine.send(encode(self._prepare_weights(message)))
            case CommitWeights(update_id):
                self._worker.weights.commit()
                self._engine.send(encode(WeightsCommitted(self._rank, update_id)))
            case DiscardWeights():
                self._worker.weights.discard()

    def _measure_weights(self, message: MeasureWeights) -> WeightsMeasured:
        try:
            room = self._worker.weights.measure(Path(message.model_dir))
        except Exception as error:
            failure = _load_failure(error)
            return WeightsMeasured(self._rank, message.update_id, "", 0, 0, failure)
        memory = room.memory
        return WeightsMeasured(
            self._rank, message.update_id, memory.host, room.needed_bytes, memory.free_bytes, None
        )

    def _prepare_weights(self, message: PrepareWeights) -> WeightsPrepared:
        failure, fingerprint = None, ""
        try:
            fingerprint = self._worker.weights.prepare(Path(message.model_dir))
        except Exception as error:  # whatever it is, nothing that serves was touched
            failure = _load_failure(error)
        return WeightsPrepared(self._rank, message.update_id, fingerprint, failure)

    def _execute(self, step: StepDescriptor) -> None:
        self._step_id = step.step_id
        try:
            outcome = self._worker.execute(step)
        except ExchangeError as error:
            broken = _first_line(error)
        else:
            self._tell(outcome)
            return
        # not before the exception is gone, which holds the group: peers wait until its connections close
        self._leave_group(self._generation, broken)

    def _join(self, message: JoinGroup) -> None:
        if message.engine_life != self.engine_life:
            self._worker.forget_engine()
            self.engine_life = message.engine_life
        expected, mine = message.model_fingerprint, self._worker.identity.model_fingerprint
        if expected not in ("", mine):
            raise CellError(f"this rank serves weights {mine}, the cell {expected}")
        try:
            self._worker.rejoin(message.store_address, message.store_port, message.timeout_seconds)
        except CellError as error:
            broken = _first_line(error)
        else:
            self._generation = message.generation
            self._say_ready()
            return
        self._leave_group(message.generation, broken)

    def _leave_group(self, generation: int, reason: str) -> None:
        self._worker.leave_group()
        self._engine.send(encode(GroupBroken(self._rank, generation, reason)))

    def _tell(self, outcome: StepOutcome) -> None:
        self._engine.send(encode(outcome.result))
        for frame in (outcome.routes, outcome.scores):
            if frame is not None:
                self._routes.send(encode(frame))


def _load_failure(error: Exception) -> LoadFailure:
    if isinstance(error, CheckpointError):
        return LoadFailure(str(error), of_checkpoint=True)
    return LoadFailure(_first_line(error), of_checkpoint=False)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
