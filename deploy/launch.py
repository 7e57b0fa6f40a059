"""Settings → Ray → placement group → actors → channels: the only wiring. Owner of all Ray handles of a cell."""

import logging
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray
import ray.exceptions
import ray.util

from cluster.channel import DealerSocket
from cluster.config import Config
from cluster.errors import CellError, DeadlineError
from cluster.log import logger
from cluster.messages import CellStatus, RankLost, StatusQuery, Stop, ToHttpServer
from cluster.namespace import model_fingerprint
from cluster.wire import Decoder, encode
from deploy.actors.engine import Engine
from deploy.actors.expert_worker import ExpertWorker
from deploy.actors.http_server import HttpServer
from deploy.cell_plan import CellPlan

OBJECT_STORE_BYTES = 100 * 2**20
"""Ray's object store is not on our path; this is about its minimum."""
_LOG = logger("launch")


class Progress(Protocol):
    """What a start tells whoever watches it."""

    def loading(self, fraction: float) -> None: ...


class RayCluster:
    """A local Ray cluster of our own, in a temporary directory of its own that is removed with it."""

    def __init__(self, num_cpus: int, num_gpus: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="pointsman-"))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray has no argument for it
        for last in (False, True):
            try:
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    logging_level=logging.ERROR,
                    _temp_dir=str(self._directory),
                )
                return
            except (
                Exception
            ) as error:  # Ray raises a bare Exception when its 30 s for a node are over
                ray.shutdown()
                if last:
                    shutil.rmtree(self._directory, ignore_errors=True)
                    raise CellError(f"Ray did not start: {error}") from error
                _LOG.warning("ray start failed, once more reason=%s", error)

    def close(self) -> None:
        ray.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)


@dataclass
class Cell:
    """The running actors. `run_refs` are the endless calls: one that ends means that its process did."""

    plan: CellPlan
    engine: Any
    workers: list[Any]
    http_server: Any = None
    engine_ref: Any = None
    worker_refs: list[Any] = field(default_factory=list)
    http_ref: Any = None
    link: "EngineLink | None" = None
    port: int = 0
    admin_port: int = 0


class EngineLink:
    """The launcher's own line to the engine."""

    def __init__(self, endpoint: str) -> None:
        self._socket = DealerSocket(f"launcher-{os.getpid()}")
        self._socket.connect(endpoint)
        self._decoder: Decoder[ToHttpServer] = Decoder(ToHttpServer)
        self._next_query = 0

    def status(self, timeout_seconds: float) -> CellStatus | None:
        """None when the engine does not answer in time."""
        self._next_query += 1
        self._socket.send(encode(StatusQuery(self._next_query)))
        deadline = time.monotonic() + timeout_seconds
        while (remaining := deadline - time.monotonic()) > 0:
            frame = self._socket.receive(remaining)
            message = None if frame is None else self._decoder.decode(frame)
            if isinstance(message, CellStatus) and message.query_id == self._next_query:
                return message
        return None

    def rank_lost(self, rank: int, reason: str) -> None:
        self._socket.send(encode(RankLost(rank, reason)))

    def stop(self, reason: str) -> None:
        self._socket.send(encode(Stop(reason)))

    def close(self) -> None:
        self._socket.close_after_sending(1.0)


def launch_cell(config: Config, plan: CellPlan, progress: Progress) -> Cell:
    """Actors in a placement group, weights loaded, group joined, engine ready, HTTP listening.

    Raises CellError naming the part that failed, DeadlineError when `cell.start_timeout_seconds` is over.
    """
    deadline = time.monotonic() + config.cell.start_timeout_seconds
    bundles = _reserve(plan, deadline)
    fingerprint = model_fingerprint(plan.model_dir, plan.dtype)
    cell = Cell(plan, engine=None, workers=[])
    cell.workers = [_start_worker(plan, bundles, rank) for rank in range(plan.ep_size)]
    cell.engine = _actor(Engine, bundles, plan.ep_size).remote(config, plan, fingerprint)
    front, worker_endpoint, route_endpoint = _get(
        cell.engine.endpoints.remote(), deadline, "the engine"
    )
    cell.engine_ref = cell.engine.run.remote()
    cell.link = EngineLink(front)
    _load_weights(cell, config, deadline, progress)
    cell.worker_refs = [w.run.remote(worker_endpoint, route_endpoint) for w in cell.workers]
    _wait_until_ready(cell, deadline)
    cell.http_server = _actor(HttpServer, bundles, plan.ep_size).remote(config, plan, front)
    cell.port, cell.admin_port = _get(cell.http_server.start.remote(), deadline, "the HTTP server")
    cell.http_ref = cell.http_server.run.remote()
    return cell


def _reserve(plan: CellPlan, deadline: float) -> Any:
    """One bundle per rank and one for engine and HTTP server, all or none."""
    per_rank = {"CPU": 1.0, "GPU": 1.0} if plan.uses_gpus else {"CPU": 1.0}
    group = ray.util.placement_group([per_rank] * plan.ep_size + [{"CPU": 1.0}], strategy="PACK")
    if not group.wait(max(1.0, deadline - time.monotonic())):
        raise DeadlineError(f"no room for {plan.ep_size} ranks: {ray.available_resources()} free")
    return group


def _actor(cls: type, bundles: Any, bundle: int, **options: Any) -> Any:
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=bundles, placement_group_bundle_index=bundle
    )
    return ray.remote(cls).options(
        num_cpus=options.pop("num_cpus", 0.5),
        scheduling_strategy=strategy,
        max_concurrency=4,
        **options,
    )


def _start_worker(plan: CellPlan, bundles: Any, rank: int) -> Any:
    options: dict[str, Any] = {"num_cpus": 1, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    if plan.uses_gpus:
        options["num_gpus"] = 1
    return _actor(ExpertWorker, bundles, rank, **options).remote(plan, rank)


def _load_weights(cell: Cell, config: Config, deadline: float, progress: Progress) -> None:
    """All ranks load and join at once; the first failure ends the wait."""
    workers = cell.workers
    address, port = _get(
        workers[0].host_rendezvous.remote(config.cell.start_timeout_seconds), deadline, "rank 0"
    )
    loads = {
        worker.load.remote(address, port, config.cell.start_timeout_seconds): rank
        for rank, worker in enumerate(workers)
    }
    pending = list(loads)
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=0.5)
        for ref in done:
            _get(ref, deadline, f"rank {loads[ref]}")
        if time.monotonic() > deadline:
            ranks = ", ".join(str(loads[ref]) for ref in pending)
            raise DeadlineError(f"rank {ranks} did not load in time (cell.start_timeout_seconds)")
        if pending:
            fractions = _get([w.progress.remote() for w in workers], deadline, "a rank")
            progress.loading(sum(fractions) / len(fractions))
    progress.loading(1.0)


def _wait_until_ready(cell: Cell, deadline: float) -> None:
    assert cell.link is not None
    while True:
        status = cell.link.status(1.0)
        if status is not None and status.ready:
            return
        ended, _ = ray.wait([cell.engine_ref, *cell.worker_refs], timeout=0)
        for ref in ended:
            raise CellError(f"a process ended during the start: {reason_of(ref)}")
        if time.monotonic() > deadline:
            raise DeadlineError("the engine did not become ready (cell.start_timeout_seconds)")


def _get(ref: Any, deadline: float, who: str) -> Any:
    """A result of another process. Its failure becomes a CellError with one line."""
    try:
        return ray.get(ref, timeout=max(1.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineError(f"{who} did not answer in time (cell.start_timeout_seconds)") from error
    except ray.exceptions.RayTaskError as error:
        raise CellError(f"{who}: {error.cause}") from error
    except ray.exceptions.RayError as error:
        raise CellError(f"{who}: {one_line(error)}") from error


def reason_of(ref: Any) -> str:
    """Why an endless call ended."""
    try:
        result = ray.get(ref, timeout=1.0)
    except ray.exceptions.RayTaskError as error:
        return f"{type(error.cause).__name__}: {error.cause}"
    except ray.exceptions.RayError as error:
        return one_line(error)
    return str(result) if result else "it returned"


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
