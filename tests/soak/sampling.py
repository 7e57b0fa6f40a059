"""What a cell holds at one moment: its processes, as the kernel counts, and the engine's own account."""

import contextlib
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.helpers.served import Served, address_of
from tests.integration.api import CellApi, MetricValues

MIB = 2**20
HTTP_SERVER = "HTTP server"
RAY = "Ray: "
"""How names of its own processes begin. They are its makers' to judge."""
_RANK = re.compile(r"rank ready rank=(\d+) pid=(\d+)", re.ASCII)
_HELD = {
    ("pointsman_requests_running", ()): "engine: requests running",
    ("pointsman_requests_waiting", ()): "engine: requests waiting",
    ("pointsman_prefix_store_nodes", ()): "engine: store nodes",
    ("pointsman_prefix_store_bytes", ("routes",)): "engine: route bytes",
    ("pointsman_prefix_store_bytes", ("scores",)): "engine: score bytes",
    ("pointsman_plan_fragments", ()): "engine: plan fragments",
    ("pointsman_plan_fragment_bytes", ()): "engine: plan bytes",
    ("pointsman_state_waiting_bytes", ()): "engine: state bytes waiting",
}
_TOTALS = {
    "steps_total": "steps",
    "requests_finished_total": "requests that ended",
    "preemptions_total": "preemptions",
    "prompt_tokens_total": "prompt tokens",
    "generation_tokens_total": "tokens generated",
    "rank_tokens_total": "tokens by rank",
    "prefix_store_evictions_total": "blocks whose part was evicted",
    "plan_fragment_hits_total": "plan fragments found",
    "plan_fragment_misses_total": "plan fragments compiled",
    "replay_fallbacks_total": "tokens not replayed by a plan",
    "state_snapshots_total": "snapshots",
    "state_runs_dropped_total": "runs that were not written when they came",
}
_RAY_KINDS = (
    ("gcs_server", "gcs_server"),
    ("raylet/raylet", "raylet"),
    ("log_monitor.py", "log monitor"),
    ("runtime_env/agent", "runtime env agent"),
    ("dashboard/agent", "dashboard agent"),
    ("dashboard.py", "dashboard"),
    ("ray::IDLE", "idle workers"),
)


class Sampler:
    """Reads; changes nothing. A process that ends meanwhile is left out."""

    def __init__(self, served: Served, api: CellApi, state_dir: Path) -> None:
        self._served = served
        self._api = api
        self._state_dir = state_dir
        self._ports = {address_of(url)[1] for url in (api.base_url, api.admin_url)}

    def values(self) -> dict[str, float]:
        values: Counter[str] = Counter()
        names = self._names()
        for process in self._served.processes():
            with contextlib.suppress(psutil.Error, FileNotFoundError):
                values.update(self._of_process(_name(process, names), process))
        return dict(values) | self._of_engine() | self._on_disk()

    def totals(self) -> list[str]:
        """Of the engine's counters, since it was started."""
        metrics = self._api.metrics()
        return [
            f"{what}: {_listed(metrics, f'pointsman_{name}')}" for name, what in _TOTALS.items()
        ]

    def _of_process(self, name: str, process: psutil.Process) -> dict[str, float]:
        """Connections of clients come and go, and are not among its descriptors."""
        memory = process.memory_full_info()
        files = list(Path(f"/proc/{process.pid}/fd").iterdir())
        values: dict[str, float] = {
            f"{name}, RSS MiB": memory.rss / MIB,
            f"{name}, USS MiB": memory.uss / MIB,
            f"{name}, threads": process.num_threads(),
        }
        num_clients = 0
        if name.startswith(HTTP_SERVER):
            num_clients = self.num_clients(process)
            values[f"{name}, connections of clients"] = num_clients
        values[f"{name}, descriptors"] = len(files) - num_clients
        values[f"{name}, sockets"] = sum(map(_is_socket, files)) - num_clients
        return values

    def num_clients(self, process: psutil.Process) -> int:
        """Connections that an HTTP server has accepted."""
        return sum(
            connection.laddr.port in self._ports and connection.status != psutil.CONN_LISTEN
            for connection in process.net_connections("tcp")
        )

    def _names(self) -> dict[int, str]:
        """Of processes that are the cell's own, by pid."""
        names = {self._served.process.pid: "launcher", self._served.pid_of("Engine"): "engine"}
        names |= {int(pid): f"rank {rank}" for rank, pid in _RANK.findall(self._served.stderr)}
        for number, pid in enumerate(sorted(self._served.pids_of("HttpServer"))):
            names[pid] = f"{HTTP_SERVER} {number}"
        return names

    def _of_engine(self) -> dict[str, float]:
        text = self._api.metrics_text()
        metrics, status = self._api.metrics(), self._api.status()
        values = {name: metrics[key] for key, name in _HELD.items()}
        values["engine: KV blocks used"] = sum(status["kv_blocks_used"])
        values["engine: KV blocks free"] = sum(status["kv_blocks_free"])
        values["engine: KV blocks leased"] = status["kv_blocks_leased"]
        values["engine: series of metrics"] = len(metrics)
        values["engine: metrics page, KiB"] = len(text) / 1024
        return values

    def _on_disk(self) -> dict[str, float]:
        (logs,) = self._served.directory.glob("*/session_[0-9]*/logs")
        return {
            "disk: state directory, MiB": _size(self._state_dir) / MIB,
            "disk: logs, MiB": _size(logs) / MIB,
        }


def _name(process: psutil.Process, names: Mapping[int, str]) -> str:
    if process.pid in names:
        return names[process.pid]
    line = " ".join(process.cmdline())
    if "router_service.grammar_child" in line:
        parent = process.ppid()
        return f"grammars of {names[parent]}" if parent in names else "grammars, compiling"
    return RAY + next((kind for mark, kind in _RAY_KINDS if mark in line), "others")


def _listed(metrics: MetricValues, name: str) -> str:
    found = {labels: value for (its, labels), value in metrics.items() if its == name}
    return ", ".join(f"{' '.join(labels)} {value:.0f}".strip() for labels, value in found.items())


def _is_socket(descriptor: Path) -> bool:
    with contextlib.suppress(OSError):
        return str(descriptor.readlink()).startswith("socket:")
    return False


def _size(directory: Path) -> int:
    total = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):  # it may just have gone
            total += file.lstat().st_size if not file.is_symlink() else 0
    return total
