"""A real cell without Ray: forked expert workers over gloo and ZeroMQ; worker client, engine and store are real."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, Store

from cluster.channel import PullSocket, RouterSocket
from cluster.channel_keys import PeerKeys
from cluster.gatekeeper import Gatekeeper
from cluster.model_config.read import read_model_spec
from cluster.model_spec import ModelSpec
from cluster.namespace import model_fingerprint
from cluster.placement import ExpertPlacement
from cluster.rank_place import RankPlace
from cluster.types import DispatchMode, Rank
from cluster.worker_messages import CellIdentity
from expert_workers.worker import ExpertWorker
from expert_workers.worker_builder import WorkerOptions, build_expert_worker
from expert_workers.worker_loop import run_worker
from prefix_store.compiler_thread import CompilerThread
from router_service.clients import Workers
from router_service.plan_book import PlanLimits
from router_service.step_clock import StepClock
from router_service.worker_client import WorkerClient
from tests.helpers.channel_keys import KEYS
from tests.helpers.engines import EngineHarness, Planning

LOOPBACK = "127.0.0.1"
START_SECONDS = 60.0
PLAN_AHEAD_TOKENS = 64
"""Less than some prompts have, so that their window moves."""


BuildWorker = Callable[[WorkerOptions, Store], ExpertWorker]


@dataclass(frozen=True)
class CellOptions:
    model_dir: Path
    ep_size: int = 1
    deterministic: bool = True
    negotiated: bool = False
    """Even with one rank."""
    placement: ExpertPlacement | None = None
    """None: contiguous. The epoch is 0."""
    num_kv_blocks: int = 600
    block_size: int = 16
    engine: dict[str, Any] = field(default_factory=dict)
    """Further arguments of EngineHarness."""
    build_worker: BuildWorker | None = None
    """In place of `build_expert_worker`; called in the forked process of each rank."""

    @property
    def dispatch(self) -> DispatchMode:
        return "negotiated" if self.negotiated or self.ep_size > 1 else "local"


@dataclass(frozen=True)
class RunningRanks:
    """Expert workers that several engines may use, one after the other: each starts with an empty store."""

    options: CellOptions
    spec: ModelSpec
    client: WorkerClient
    _first_fragment_ids: Iterator[int] = field(default_factory=lambda: count(0, 2**20))
    """Of each engine: ranks keep what earlier ones sent."""

    def engine(
        self, workers: Workers | None = None, *, fragment_tokens: int = 0, **arguments: Any
    ) -> EngineHarness:
        """`workers`: in place of the ranks' own client, for tests that stand between the two.

        fragment_tokens: with more than 0, replayed tokens travel by plans of so many tokens, however few they are.
        """
        defaults: dict[str, Any] = {
            "planned": self._planning(fragment_tokens) if fragment_tokens else None,
            "num_ranks": self.options.ep_size,
            "block_size": self.options.block_size,
            "num_kv_blocks": self.options.num_kv_blocks,
            "dispatch": self.options.dispatch,
        }
        return EngineHarness(
            workers or self.client, self.spec.route_shape, **(defaults | arguments)
        )

    def _planning(self, fragment_tokens: int) -> Planning:
        ep_size = self.options.ep_size
        placement = self.options.placement or ExpertPlacement.contiguous(
            self.spec.gate.num_experts, ep_size
        )
        limits = PlanLimits(
            num_ranks=ep_size,
            placement_epoch=placement.epoch,
            fragment_tokens=fragment_tokens,
            memory_bytes=2**30,
            wait_seconds=START_SECONDS,
            min_run_tokens=1,
            ahead_tokens=PLAN_AHEAD_TOKENS,
            max_pump_bytes=2**20,
        )
        first_id = next(self._first_fragment_ids)
        return Planning(limits, CompilerThread(placement), self.client, first_id)


@contextmanager
def running_ranks(options: CellOptions) -> Iterator[RunningRanks]:
    spec = read_model_spec(options.model_dir)
    with (
        Gatekeeper() as gatekeeper,
        RouterSocket() as clients,
        RouterSocket(gatekeeper.door("workers", KEYS.engine.workers)) as workers,
        PullSocket(gatekeeper.door("routes", KEYS.engine.workers)) as routes,
        TemporaryDirectory() as directory,
    ):
        clients.bind(LOOPBACK)
        meeting_file = f"{directory}/ep-group"
        endpoints = workers.bind(LOOPBACK), routes.bind(LOOPBACK)
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(
                target=run_rank,
                args=(options, rank, meeting_file, *endpoints, KEYS.worker),
                daemon=True,
            )
            for rank in range(options.ep_size)
        ]
        for process in processes:
            process.start()
        client = WorkerClient(
            identity=cell_identity(options),
            workers=workers,
            routes=routes,
            clients=clients,
            on_client_message=lambda: None,
            clock=StepClock(factor=50.0, floor_seconds=60.0),
        )
        try:
            client.wait_until_ready(START_SECONDS)
            yield RunningRanks(options, spec, client)
        finally:
            _end(client, processes)


@contextmanager
def running_cell(options: CellOptions) -> Iterator[EngineHarness]:
    """Ranks and one engine."""
    with running_ranks(options) as ranks:
        yield ranks.engine(**options.engine)


def cell_identity(options: CellOptions) -> CellIdentity:
    return CellIdentity(
        model_fingerprint=model_fingerprint(options.model_dir, "float32"),
        dtype="float32",
        deterministic=options.deterministic,
        ep_size=options.ep_size,
        placement_epoch=0,
        dispatch=options.dispatch,
        block_size=options.block_size,
        num_kv_blocks=options.num_kv_blocks,
    )


def run_rank(
    options: CellOptions,
    rank: int,
    meeting_file: str,
    engine_endpoint: str,
    route_endpoint: str,
    keys: PeerKeys,
) -> None:
    """The ranks meet in a file: a TCP store served by the forking process looks up the names of those who have come
    while the next rank is forked, and a lock held there would stay held in the fork."""
    torch.set_num_threads(1)
    build_worker = options.build_worker or _build_worker
    worker = build_worker(
        WorkerOptions(
            model_dir=options.model_dir,
            rank=Rank(rank),
            ep_size=options.ep_size,
            dtype="float32",
            device=torch.device("cpu"),
            num_kv_blocks=options.num_kv_blocks,
            block_size=options.block_size,
            deterministic=options.deterministic,
            dispatch=options.dispatch,
            exchange="gloo",
            host_address=LOOPBACK,
            store_address=LOOPBACK,
            store_port=0,
            join_timeout_seconds=START_SECONDS,
            exchange_timeout_seconds=START_SECONDS,
            placement=options.placement,
        ),
        FileStore(meeting_file, options.ep_size),
    )
    run_worker(
        worker,
        rank=Rank(rank),
        place=RankPlace(LOOPBACK, "cpu"),
        engine_endpoint=engine_endpoint,
        route_endpoint=route_endpoint,
        keys=keys,
    )


def _build_worker(options: WorkerOptions, store: Store) -> ExpertWorker:
    return build_expert_worker(options, store=store)


def _end(client: WorkerClient, processes: list[Any]) -> None:
    client.stop()
    for process in processes:
        process.join(timeout=5.0)
        if process.is_alive():
            process.kill()
            process.join()
