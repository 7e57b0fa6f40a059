"""What a cell starts on: a Ray of its own on this machine (here), or a cluster that runs already (`joined_ray`)."""

import sys
from typing import Protocol

from cluster.config import HttpSection
from deploy.cell_plan import CellPlan
from deploy.launch import num_ray_cpus
from deploy.ports import check_ports
from deploy.ray_cluster import RayCluster


class Ground(Protocol):
    """Owner of this process's Ray."""

    def open(self) -> CellPlan:
        """What can be served on it. Raises CellError when Ray is not there, ConfigError when it can't be served."""

    def close(self) -> None:
        """Leaves nothing running of what this process started. Idempotent."""


class OwnRay:
    """Started for this cell and ended with it."""

    def __init__(self, plan: CellPlan, http: HttpSection) -> None:
        self._plan = plan
        self._http = http
        self._cluster: RayCluster | None = None

    def open(self) -> CellPlan:
        check_ports(self._http)
        tell_start(self._plan)
        num_gpus = self._plan.ep_size if self._plan.uses_gpus else 0
        num_cpus = num_ray_cpus(self._plan.ep_size, self._http.servers)
        self._cluster = RayCluster(num_cpus, num_gpus)
        return self._plan

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()


def tell_start(plan: CellPlan) -> None:
    print(
        f"starting {plan.served_model_name}: {plan.ep_size} expert workers, "
        f"{plan.spec.gate.num_experts // plan.ep_size} experts per MoE layer each, {plan.dtype}",
        file=sys.stderr,
        flush=True,
    )
