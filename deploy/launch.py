"""Settings → Ray → placement group → actors → channels: the only wiring. Owner of all Ray handles of a cell."""

import math
import os
import time
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.channel_keys import CellKeys
from cluster.config import Config
from cluster.errors import CellError, DeadlineError
from cluster.messages import WeightsServed
from cluster.namespace import model_fingerprint
from deploy.actor_calls import end_of, result_of
from deploy.actors.engine import Engine
from deploy.actors.expert_worker import ExpertWorker, LoadedRank
from deploy.actors.http_server import HttpServer
from deploy.cell_plan import CellPlan
from deploy.engine_link import EngineLink
from deploy.http_servers import HttpServers
from deploy.ray_engine import RayEngine
from deploy.ray_head import RayHead, end_actors, joined_head
from deploy.ray_ranks import RayRanks
from deploy.reservation import Reservation, reserve
from deploy.room import CellDemand
from router_service.api_keys import HttpKeys
from router_service.engine_life import EngineLife
from router_service.http_server import BoundPorts
from router_service.tracing import trace_environment

PROCESS_CPUS = 0.5
"""What Ray counts for the engine and for each HTTP server."""

WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Of ranks. torch's warnings of a connection that broke, a hundred lines of frames each, are told as errors in our own
words."""


class Progress(Protocol):
    """What a start tells whoever watches it."""

    def loading(self, fraction: float) -> None: ...


@dataclass
class Cell:
    """The running actors."""

    plan: CellPlan
    reservation: Reservation
    engine: RayEngine
    link: EngineLink
    ranks: RayRanks
    http_servers: HttpServers
    head: RayHead


def launch_cell(
    config: Config, plan: CellPlan, progress: Progress, http_keys: HttpKeys | None = None
) -> Cell:
    """Actors in a placement group, weights loaded, group joined, engine ready, HTTP listening.

    Raises CellError naming the part that failed, DeadlineError when `cell.placement_timeout_seconds` or
    `cell.start_timeout_seconds` is over. Then nothing of it runs and nothing is reserved any more.
    """
    head = joined_head(config.cluster)
    reservation = reserve_cell(
        plan, config.cell.placement_timeout_seconds, num_http_servers=config.http.servers
    )
    try:
        return _launch(config, plan, reservation, head, progress, http_keys or HttpKeys())
    except BaseException:
        if head.answers():
            reservation.release()
        raise


def _launch(
    config: Config,
    plan: CellPlan,
    reservation: Reservation,
    head: RayHead,
    progress: Progress,
    http_keys: HttpKeys,
) -> Cell:
    deadline = time.monotonic() + config.cell.start_timeout_seconds
    fingerprint = model_fingerprint(plan.model_dir, plan.dtype)
    keys = CellKeys.make()
    actors = [_start_worker(plan, reservation, rank, keys) for rank in range(plan.ep_size)]
    engine = RayEngine(
        lambda life, expected: front_actor(Engine, reservation).remote(
            config, plan, expected, keys.engine, life
        ),
        head,
    )
    started = result_of(engine.start(EngineLife(), fingerprint), deadline, "the engine")
    ranks = RayRanks(
        lambda rank: _start_worker(plan, reservation, rank, keys),
        (started.workers, started.routes),
        config.cell.recovery_limit_seconds,
        engine_life=lambda: engine.life,
        head=head,
    )
    ranks.actors.update(enumerate(actors))
    engine.run(started)
    link = EngineLink(started.clients, keys.launcher, WeightsServed("", fingerprint))
    for rank, loaded in sorted(_load_weights(actors, config, deadline, progress).items()):
        ranks.run(rank, 0, loaded)
    _wait_until_ready(link, engine, ranks, deadline)
    traces = trace_environment(config.http.tracing, os.environ)
    http_servers = HttpServers(
        lambda: front_actor(HttpServer, reservation).remote(
            config, plan, started.clients, keys.http_server, http_keys, trace_environment=traces
        ),
        config.http.servers,
        kill_actor=lambda actor: end_actors([actor], head),
        can_start=head.answers,
    )
    http_servers.start(BoundPorts(config.http.port, config.http.admin_port), deadline)
    return Cell(plan, reservation, engine, link, ranks, http_servers, head)


def num_ray_cpus(ep_size: int, num_http_servers: int) -> int:
    """What a cell reserves, and one to spare."""
    return ep_size + 1 + math.ceil(_front_cpus(num_http_servers))


def _front_cpus(num_http_servers: int) -> float:
    return PROCESS_CPUS * (1 + num_http_servers)


def reserve_cell(plan: CellPlan, seconds: float, *, num_http_servers: int = 1) -> Reservation:
    """Raises DeadlineError with what is missing."""
    return reserve(cell_demand(plan, num_http_servers), seconds)


def cell_demand(plan: CellPlan, num_http_servers: int) -> CellDemand:
    """Engine and HTTP servers stay on this process's host."""
    front = ray.get_runtime_context().get_node_id()
    return CellDemand(plan.ep_size, int(plan.uses_gpus), front, _front_cpus(num_http_servers))


def front_actor(cls: type, reservation: Reservation) -> Any:
    """Beside the other ones of its kind, which share ports: the engine and the HTTP servers."""
    return actor_in(cls, reservation.for_front(), num_cpus=PROCESS_CPUS)


def actor_in(cls: type, strategy: PlacementGroupSchedulingStrategy, **options: Any) -> Any:
    return ray.remote(cls).options(scheduling_strategy=strategy, max_concurrency=4, **options)


def _start_worker(plan: CellPlan, reservation: Reservation, rank: int, keys: CellKeys) -> Any:
    options: dict[str, Any] = {"num_cpus": 1, "runtime_env": {"env_vars": WORKER_ENVIRONMENT}}
    if plan.uses_gpus:
        options["num_gpus"] = 1
    return actor_in(ExpertWorker, reservation.for_rank(rank), **options).remote(
        plan, rank, keys.worker
    )


def _load_weights(
    workers: list[Any], config: Config, deadline: float, progress: Progress
) -> dict[int, LoadedRank]:
    """All ranks load and join at once; the first failure ends the wait."""
    address, port = result_of(
        workers[0].host_rendezvous.remote(config.cell.start_timeout_seconds), deadline, "rank 0"
    )
    loads = {
        worker.load_and_join.remote(address, port, config.cell.start_timeout_seconds): rank
        for rank, worker in enumerate(workers)
    }
    loaded: dict[int, LoadedRank] = {}
    pending = list(loads)
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=0.5)
        for ref in done:
            loaded[loads[ref]] = result_of(ref, deadline, f"rank {loads[ref]}")
        if time.monotonic() > deadline:
            ranks = ", ".join(str(loads[ref]) for ref in pending)
            raise DeadlineError(f"rank {ranks} did not load in time (cell.start_timeout_seconds)")
        if pending:
            fractions = result_of([w.progress.remote() for w in workers], deadline, "a rank")
            progress.loading(sum(fractions) / len(fractions))
    progress.loading(1.0)
    return loaded


def _wait_until_ready(
    link: EngineLink, engine: RayEngine, ranks: RayRanks, deadline: float
) -> None:
    while True:
        status = link.status(1.0)
        if status is not None and status.ready:
            return
        ended, _ = ray.wait([*engine.calls, *ranks.calls.values()], timeout=0)
        for ref in ended:
            if ref in engine.calls:
                raise CellError(f"the engine ended during the start: {end_of(ref).reason}")
            rank = next(rank for rank, call in ranks.calls.items() if call == ref)
            raise CellError(f"rank {rank} ended during the start: {end_of(ref).reason}")
        if time.monotonic() > deadline:
            raise DeadlineError("the engine did not become ready (cell.start_timeout_seconds)")
