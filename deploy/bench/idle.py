"""`pointsman bench idle`: CPU of an idle cell beside that of Ray with as many empty actors on the same resources."""

import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import ray
from msgspec.structs import replace

from cluster.config import Config
from cluster.errors import CellError
from deploy.cell_plan import CellPlan
from deploy.cell_watch import CellWatch
from deploy.launch import actor_in, front_actor, launch_cell, num_ray_cpus, reserve_cell
from deploy.planning import plan_cell
from deploy.ray_cluster import RayCluster
from deploy.supervisor import take_down

SETTLE_SECONDS = 10.0
MEASURE_SECONDS = 60.0
_START_SECONDS = 120.0


def run(config: Config) -> list[dict[str, Any]]:
    """Two rows, `cpu_percent_of_a_core` of the whole process tree, this process included."""
    any_port = replace(config, http=replace(config.http, port=0, admin_port=0))
    plan = plan_cell(any_port)
    return [
        _measure(plan, "empty_actors", lambda: _EmptyActors(plan)),
        _measure(plan, "idle_cell", lambda: _Cell(any_port, plan)),
    ]


class Empty:
    def wait(self) -> None:
        """Nothing to do; says that the process is up."""


class _EmptyActors:
    """As many processes in the same placement group as a cell has."""

    def __init__(self, plan: CellPlan) -> None:
        place = reserve_cell(plan, _START_SECONDS)
        self._actors = [
            actor_in(Empty, place.for_rank(rank), num_cpus=1).remote()
            for rank in range(plan.ep_size)
        ]
        self._actors += [front_actor(Empty, place).remote() for _ in ("engine", "HTTP server")]
        ray.get([actor.wait.remote() for actor in self._actors], timeout=_START_SECONDS)

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    def end(self) -> None:
        self._actors.clear()


class _Cell:
    """A cell that nobody asks anything, watched as `pointsman serve` does."""

    def __init__(self, config: Config, plan: CellPlan) -> None:
        self._cell = launch_cell(config, plan, _Silent())

    def idle(self, seconds: float) -> None:
        stop = threading.Event()
        threading.Timer(seconds, stop.set).start()
        failure = CellWatch(self._cell, 0.0).until(stop)
        if failure is not None:
            raise CellError(failure)

    def end(self) -> None:
        take_down(self._cell, "measured")


class _Silent:
    def loading(self, fraction: float) -> None:
        """Nobody watches."""


def _measure(
    plan: CellPlan, what: str, start: Callable[[], _EmptyActors | _Cell]
) -> dict[str, Any]:
    num_gpus = plan.ep_size if plan.uses_gpus else 0
    with RayCluster(num_ray_cpus(plan.ep_size, 1), num_gpus):
        subject = start()
        subject.idle(SETTLE_SECONDS)
        started, before = time.monotonic(), _cpu_seconds()
        subject.idle(MEASURE_SECONDS)
        wall, after = time.monotonic() - started, _cpu_seconds()
        subject.end()
    percent = {name: round(100 * (after[name] - before.get(name, 0.0)) / wall, 2) for name in after}
    return {
        "what": what,
        "ep_size": plan.ep_size,
        "cpu_percent_of_a_core": round(sum(percent.values()), 2),
        "by_process": dict(sorted(percent.items(), key=lambda item: -item[1])),
    }


def _cpu_seconds() -> dict[str, float]:
    """By process name, this process and all below it."""
    this = psutil.Process()
    seconds: dict[str, float] = {}
    for process in [this, *this.children(recursive=True)]:
        name = "this process" if process == this else process.name()
        times = process.cpu_times()
        seconds[name] = seconds.get(name, 0.0) + times.user + times.system
    return seconds
