"""The Ray actor `Engine`: the engine service and its prefix store, composed. One per cell, and one at a time."""

import gc
import os
from dataclasses import dataclass

import ray.util

from cluster.channel_keys import EngineKeys
from cluster.config import Config
from cluster.log import configure_logging
from deploy.cell_plan import CellPlan
from deploy.engine_side import open_store, served_shapes, start_compiler
from router_service.engine_life import EngineLife
from router_service.engine_service import EngineService
from router_service.engine_sockets import EngineAddress
from router_service.served_checkpoint import ServedCheckpoint

GARBAGE_THRESHOLDS = 10_000, 20, 10_000
"""Allocations before a young collection, young before a middle one, middle before a full one. A full collection stops
the engine for as long as it takes to look at the whole prefix store: seconds for a million nodes, in vain."""


@dataclass(frozen=True)
class StartedEngine:
    """Which process an engine is, and where: for clients (HTTP servers and the launcher), workers and route frames."""

    pid: int
    clients: str
    workers: str
    routes: str

    @property
    def ports(self) -> tuple[int, int, int]:
        clients, workers, routes = (
            int(endpoint.rpartition(":")[2])
            for endpoint in (self.clients, self.workers, self.routes)
        )
        return clients, workers, routes


class Engine:
    """`run` occupies one thread of the actor until the cell ends."""

    def __init__(
        self,
        config: Config,
        plan: CellPlan,
        fingerprint: str,
        keys: EngineKeys,
        life: EngineLife,
    ) -> None:
        """fingerprint: of the weights that the ranks serve"""
        configure_logging()
        gc.set_threshold(*GARBAGE_THRESHOLDS)
        self._service = EngineService(
            config,
            plan.identity(fingerprint),
            served_shapes(plan),
            store=open_store(plan, fingerprint),
            compiler=start_compiler(plan),
            checkpoint=ServedCheckpoint(plan.model_dir, plan.spec, plan.dtype),
            address=EngineAddress(ray.util.get_node_ip_address(), keys, life),
        )

    def started(self) -> StartedEngine:
        service = self._service
        return StartedEngine(
            os.getpid(), service.client_endpoint, service.worker_endpoint, service.route_endpoint
        )

    def pulse(self) -> bool:
        """That the process lives, whatever its loop waits for."""
        return True

    def run(self) -> str | None:
        """None after a stop that was asked for, else why the cell failed."""
        return self._service.run()
