"""Other weights for a cell that serves, between two steps: by all ranks or by none.

  inspect   the directory, on a thread; clients are served, no step runs from here on
  settle    what committed steps still owe is taken, as the present weights' own
  measure   every rank says what its share would take, and all shares of a host must fit its memory
  prepare   every rank reads its share beside the one that serves
  exchange  what has begun ends, what has not goes on under other namespaces, the store is emptied
  commit    every rank serves what it has read

Up to `prepare` nothing is touched, so a failure there leaves all as it was. Later nothing fails but with a rank, or the
engine: who comes in its place has the other weights, and a rank that has not taken them is replaced.
"""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, Protocol

from cluster.errors import CellError, CheckpointError, DeadlineError
from cluster.log import logger
from cluster.messages import UpdateWeights, WeightsRefused, WeightsServed, WeightsUpdated
from cluster.namespace import weight_version
from cluster.worker_messages import (
    CommitWeights,
    LoadFailure,
    MeasureWeights,
    PrepareWeights,
    WeightsMeasured,
    WeightsPrepared,
)
from router_service.engine import Engine
from router_service.served_checkpoint import WeightSource
from router_service.weight_room import lack_of_room

POLL_SECONDS = 0.02
"""While a directory is read on the thread, clients are served at least so often."""

_LOG = logger("weights")


class WeightRanks(Protocol):
    """All expert workers of the cell. Every wait raises RankLostError or DeadlineError naming who did not answer."""

    def measure_weights(
        self, message: MeasureWeights, timeout_seconds: float
    ) -> list[WeightsMeasured]:
        """By rank."""
        ...

    def prepare_weights(
        self, message: PrepareWeights, timeout_seconds: float
    ) -> list[WeightsPrepared]:
        """By rank."""
        ...

    def commit_weights(self, message: CommitWeights, timeout_seconds: float) -> None: ...

    def discard_weights(self) -> None: ...


class UpdateSurroundings(Protocol):
    """The process around the engine, which an update must not make deaf."""

    def serve(self, timeout_seconds: float) -> None:
        """Takes what has arrived, or arrives within the timeout. Raises when a rank is lost or the cell shall stop."""
        ...

    def end_requests(self) -> None:
        """Those whose clients have left or seen a stop string since the last step."""
        ...

    def note_weights(self, served: WeightsServed) -> None:
        """Every new process of the cell has these from now on."""
        ...

    def recover(self, error: CellError) -> None:
        """Ranks that are lost are replaced. Raises CellError when the cell has to end."""
        ...


class WeightUpdate:
    """One at a time; its caller sees to that."""

    def __init__(
        self,
        engine: Engine,
        ranks: WeightRanks,
        checkpoint: WeightSource,
        around: UpdateSurroundings,
        *,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """timeout_seconds: of each wait, for the directory and for the ranks."""
        self._engine = engine
        self._ranks = ranks
        self._checkpoint = checkpoint
        self._around = around
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._update_ids = itertools.count(1)

    def run(self, command: UpdateWeights) -> WeightsUpdated | WeightsRefused:
        """Refused: all is as it was before. Raises CellError when the cell cannot go on, as a step does."""
        started = self._clock()
        refused = fingerprint = None
        try:
            fingerprint = self._inspect(Path(command.model_dir))
        except CheckpointError as error:
            refused = WeightsRefused(command.query_id, "invalid", str(error))
        except DeadlineError as error:
            refused = WeightsRefused(command.query_id, "unavailable", str(error))
        if fingerprint is not None:
            self._engine.settle()
            refused = self._measure(command) or self._prepare(command, fingerprint)
        if refused is not None or fingerprint is None:
            assert refused is not None
            _LOG.warning("weights refused dir=%r reason=%r", command.model_dir, refused.reason)
            return refused
        return self._exchange(command, fingerprint, started)

    def _inspect(self, model_dir: Path) -> str:
        """Raises CheckpointError, DeadlineError."""
        inspection: Future[str] = Future()

        def inspect() -> None:
            try:
                inspection.set_result(self._checkpoint.inspect(model_dir))
            except Exception as error:
                inspection.set_exception(error)

        threading.Thread(target=inspect, name="weight-inspection", daemon=True).start()
        deadline = self._clock() + self._timeout_seconds
        while not inspection.done():
            if self._clock() > deadline:
                raise DeadlineError(
                    f"{model_dir} was not read within {self._timeout_seconds:g} s "
                    "(cell.start_timeout_seconds)"
                )
            self._around.serve(POLL_SECONDS)
        return inspection.result()

    def _measure(self, command: UpdateWeights) -> WeightsRefused | None:
        """None when the shares that every rank is about to read fit the memory of their hosts."""
        message = MeasureWeights(next(self._update_ids), command.model_dir)
        measured = self._ranks.measure_weights(message, self._timeout_seconds)
        for answer in measured:
            if answer.failure is not None:
                return _refused(command, answer.rank, answer.failure)
        lack = lack_of_room(measured)
        return None if lack is None else WeightsRefused(command.query_id, "unavailable", lack)

    def _prepare(self, command: UpdateWeights, fingerprint: str) -> WeightsRefused | None:
        """None when every rank has read its share of the same files."""
        message = PrepareWeights(next(self._update_ids), command.model_dir)
        prepared = self._ranks.prepare_weights(message, self._timeout_seconds)
        for answer in prepared:
            if answer.failure is not None:
                self._ranks.discard_weights()
                return _refused(command, answer.rank, answer.failure)
        for answer in prepared:
            if answer.model_fingerprint != fingerprint:
                self._ranks.discard_weights()
                return WeightsRefused(command.query_id, "invalid", _other_files(answer, command))
        return None

    def _exchange(self, command: UpdateWeights, fingerprint: str, started: float) -> WeightsUpdated:
        self._around.end_requests()
        self._engine.settle()
        exchange = self._engine.exchange_weights(fingerprint, restart=command.running == "restart")
        self._around.note_weights(WeightsServed(command.model_dir, fingerprint))
        try:
            self._ranks.commit_weights(CommitWeights(next(self._update_ids)), self._timeout_seconds)
        except CellError as error:
            self._around.recover(error)
        updated = WeightsUpdated(
            query_id=command.query_id,
            weight_version=weight_version(fingerprint),
            fingerprint=fingerprint,
            seconds=self._clock() - started,
            aborted=exchange.num_aborted,
            restarted=exchange.num_restarted,
            evicted_nodes=exchange.eviction.nodes,
            evicted_bytes=exchange.eviction.num_bytes,
        )
        _LOG.info(
            "weights updated version=%s dir=%r seconds=%.1f aborted=%d restarted=%d",
            updated.weight_version,
            command.model_dir,
            updated.seconds,
            updated.aborted,
            updated.restarted,
        )
        return updated


def _refused(command: UpdateWeights, rank: int, failure: LoadFailure) -> WeightsRefused:
    kind: Literal["invalid", "unavailable"] = "invalid" if failure.of_checkpoint else "unavailable"
    return WeightsRefused(command.query_id, kind, f"rank {rank}: {failure.reason}")


def _other_files(answer: WeightsPrepared, command: UpdateWeights) -> str:
    return (
        f"rank {answer.rank} has read other files in {command.model_dir} than the engine has seen there: "
        "the directory must be the same on all hosts, and complete before it is named"
    )
