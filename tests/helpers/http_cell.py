"""All that serves but Ray: forked expert workers, the engine service and an HTTP server, composed as the actors are."""

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from cluster.config import CellSection, Config, ModelSection, StoreSection
from cluster.messages import Stop
from cluster.namespace import model_fingerprint
from deploy.cell_plan import CellPlan
from deploy.engine_side import open_store, served_shapes, start_compiler
from deploy.planning import plan_cell
from router_service.engine_service import EngineService
from router_service.engine_sockets import EngineAddress
from router_service.http_server import HttpServer, HttpServerOptions
from router_service.served_checkpoint import ServedCheckpoint
from tests.helpers.cells import LOOPBACK, START_SECONDS, CellOptions, run_rank
from tests.helpers.channel_keys import KEYS
from tests.helpers.content_cell import Client
from tests.helpers.served import eventually

MODEL = "served"
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class CellClients:
    api: httpx.Client
    admin: httpx.Client


@contextmanager
def http_cell(model_dir: Path, *, ep_size: int = 1) -> Iterator[httpx.Client]:
    """A client of the cell's API, on CPU in float32, once the cell can serve."""
    with cell_clients(model_dir, ep_size=ep_size) as clients:
        yield clients.api


@contextmanager
def cell_clients(
    model_dir: Path, *, ep_size: int = 1, deterministic: bool = False, state_dir: Path | None = None
) -> Iterator[CellClients]:
    """Of both ports."""
    config = Config(
        model=ModelSection(dir=str(model_dir), served_name=MODEL, dtype="float32"),
        cell=CellSection(
            ep_size=ep_size,
            step_timeout_floor_seconds=START_SECONDS,
            deterministic=deterministic,
        ),
        store=StoreSection(state_dir="" if state_dir is None else str(state_dir)),
    )
    plan = plan_cell(config)
    fingerprint = model_fingerprint(model_dir, plan.dtype)
    service = EngineService(
        config,
        plan.identity(fingerprint),
        served_shapes(plan),
        store=open_store(plan, fingerprint),
        compiler=start_compiler(plan),
        checkpoint=ServedCheckpoint(plan.model_dir, plan.spec, plan.dtype),
        address=EngineAddress(LOOPBACK, KEYS.engine),
    )
    with ExitStack() as stack:
        stack.enter_context(_running_ranks(plan, service))
        stack.enter_context(_running(service))
        yield stack.enter_context(_api(plan, service))


@contextmanager
def _running_ranks(plan: CellPlan, service: EngineService) -> Iterator[None]:
    options = CellOptions(
        plan.model_dir,
        ep_size=plan.ep_size,
        deterministic=plan.deterministic,
        num_kv_blocks=plan.num_kv_blocks,
        block_size=plan.block_size,
    )
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as directory:
        endpoints = service.worker_endpoint, service.route_endpoint
        processes: list[Any] = [
            context.Process(
                target=run_rank,
                args=(options, rank, f"{directory}/ep-group", *endpoints, KEYS.worker),
            )
            for rank in range(plan.ep_size)
        ]
        for process in processes:
            process.start()
        try:
            yield
        finally:
            for process in processes:
                process.join(STOP_SECONDS)
                if process.is_alive():
                    process.kill()
                    process.join()


@contextmanager
def _running(service: EngineService) -> Iterator[None]:
    """Until its Stop, which also ends the workers."""
    thread = threading.Thread(target=service.run)
    thread.start()
    client = Client(service.client_endpoint, "test-stop")
    try:
        yield
    finally:
        client.send(Stop("the test ends"))
        thread.join(START_SECONDS)
        client.socket.close()
        assert not thread.is_alive(), "the service did not end"


@contextmanager
def _api(plan: CellPlan, service: EngineService) -> Iterator[CellClients]:
    server = HttpServer(
        HttpServerOptions(
            model_dir=plan.model_dir,
            served_model_name=plan.served_model_name,
            created=plan.created,
            max_model_len=plan.max_model_len,
            vocab_size=plan.spec.vocab_size,
            eos_token_ids=plan.spec.eos_token_ids,
            engine_endpoint=service.client_endpoint,
            engine_keys=KEYS.http_server,
            host=LOOPBACK,
            port=0,
            admin_host=LOOPBACK,
            admin_port=0,
            max_body_bytes=2**22,
            version="tests",
        )
    )
    ports = server.start()
    try:
        with _client(ports.port) as api, _client(ports.admin_port) as admin:
            eventually(
                lambda: api.get("/health").status_code == 200,
                START_SECONDS,
                "a cell that serves",
            )
            yield CellClients(api, admin)
    finally:
        server.stop(2)


def _client(port: int) -> httpx.Client:
    return httpx.Client(base_url=f"http://{LOOPBACK}:{port}", timeout=START_SECONDS)
