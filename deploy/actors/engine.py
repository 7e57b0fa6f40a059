"""The Ray actor `Engine`: the engine service and its prefix store, composed. One per cell."""

import ray.util

from cluster.config import Config
from cluster.log import configure_logging
from cluster.namespace import namespace_of
from cluster.placement import ExpertPlacement
from deploy.cell_plan import CellPlan
from prefix_store.compiler_thread import CompilerThread
from prefix_store.store import PrefixStore
from router_service.engine_service import EngineService


class Engine:
    """`run` occupies one thread of the actor until the cell ends."""

    def __init__(self, config: Config, plan: CellPlan, fingerprint: str) -> None:
        configure_logging()
        store = PrefixStore(
            num_ranks=plan.ep_size,
            num_kv_blocks=plan.num_kv_blocks,
            block_size=plan.block_size,
            route_shape=plan.spec.route_shape,
            route_budget_bytes=plan.route_budget_bytes,
            score_budget_bytes=plan.score_budget_bytes,
            kv_bytes_per_block=plan.kv_bytes_per_block,
        )
        self._service = EngineService(
            config,
            plan.identity(fingerprint),
            vocab_size=plan.spec.vocab_size,
            route_shape=plan.spec.route_shape,
            store=store,
            compiler=CompilerThread(
                ExpertPlacement.contiguous(plan.spec.gate.num_experts, plan.ep_size)
            ),
            namespace_of=lambda salt: namespace_of(
                fingerprint, block_size=plan.block_size, cache_salt=salt
            ),
            host=ray.util.get_node_ip_address(),
        )

    def endpoints(self) -> tuple[str, str, str]:
        """Of clients (HTTP servers and the launcher), of workers, of route frames."""
        service = self._service
        return service.client_endpoint, service.worker_endpoint, service.route_endpoint

    def run(self) -> str | None:
        """None after a stop that was asked for, else why the cell failed."""
        return self._service.run()
