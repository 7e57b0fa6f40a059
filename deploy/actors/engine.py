"""The Ray actor `Engine`: the engine service and its prefix store, composed. One per cell."""

import gc

import ray.util

from cluster.channel_keys import EngineKeys
from cluster.config import Config
from cluster.log import configure_logging
from deploy.cell_plan import CellPlan
from deploy.engine_side import open_store, served_shapes, start_compiler
from router_service.engine_service import EngineService
from router_service.served_checkpoint import ServedCheckpoint

GARBAGE_THRESHOLDS = 10_000, 20, 10_000
"""Allocations before a young collection, young before a middle one, middle before a full one. A full collection stops
the engine for as long as it takes to look at the whole prefix store: seconds for a million nodes, in vain."""


class Engine:
    """`run` occupies one thread of the actor until the cell ends."""

    def __init__(self, config: Config, plan: CellPlan, fingerprint: str, keys: EngineKeys) -> None:
        configure_logging()
        gc.set_threshold(*GARBAGE_THRESHOLDS)
        self._service = EngineService(
            config,
            plan.identity(fingerprint),
            served_shapes(plan),
            store=open_store(plan, fingerprint),
            compiler=start_compiler(plan),
            checkpoint=ServedCheckpoint(plan.model_dir, plan.spec, plan.dtype),
            host=ray.util.get_node_ip_address(),
            keys=keys,
        )

    def endpoints(self) -> tuple[str, str, str]:
        """Of clients (HTTP servers and the launcher), of workers, of route frames."""
        service = self._service
        return service.client_endpoint, service.worker_endpoint, service.route_endpoint

    def run(self) -> str | None:
        """None after a stop that was asked for, else why the cell failed."""
        return self._service.run()
