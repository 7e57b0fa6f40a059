"""`pointsman serve`: brings a cell up, watches it, and takes every process down again."""

import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import ray

from cluster.config import Config
from cluster.errors import CellError, ConfigError
from cluster.log import configure_logging, logger
from deploy.cell_plan import CellPlan
from deploy.launch import Cell, RayCluster, launch_cell, reason_of

WATCH_SECONDS = 1.0
INTERRUPTED = 130
STOP_SECONDS = 3.0
"""Each of HTTP server, engine and workers gets so long to leave by itself."""
FAREWELL_SECONDS = 8.0
"""A failed engine stays a moment, so that clients read their error."""

_LOG = logger("serve")


class StderrProgress:
    """One line that moves on a terminal, a line per quarter elsewhere."""

    def __init__(self) -> None:
        self._shown = -1

    def loading(self, fraction: float) -> None:
        percent = int(100 * fraction)
        if sys.stderr.isatty():
            print(f"\rloading weights {percent:3d} %", end="", file=sys.stderr, flush=True)
            if percent >= 100:
                print(file=sys.stderr)
        elif percent // 25 > self._shown // 25:
            print(f"loading weights {percent} %", file=sys.stderr, flush=True)
        self._shown = percent


def serve(config: Config, plan: CellPlan) -> int:
    """Blocks until a signal (returns 0) or a failure (returns 1)."""
    configure_logging()
    check_port(config.http.host, config.http.port, "--port")
    check_port(config.http.admin_host, config.http.admin_port, "--admin-port")
    print(
        f"starting {plan.served_model_name}: {plan.ep_size} expert workers, "
        f"{plan.spec.gate.num_experts // plan.ep_size} experts per MoE layer each, {plan.dtype}",
        file=sys.stderr,
        flush=True,
    )
    cluster = RayCluster(num_cpus=plan.ep_size + 2, num_gpus=plan.ep_size if plan.uses_gpus else 0)
    try:
        _on_signals(signal.default_int_handler)  # after Ray, which sets its own
        return _serve_in(config, plan)
    except KeyboardInterrupt:
        print("interrupted while starting", file=sys.stderr)
        return INTERRUPTED
    finally:
        cluster.close()


def _serve_in(config: Config, plan: CellPlan) -> int:
    cell = launch_cell(config, plan, StderrProgress())
    stop = threading.Event()
    _on_signals(lambda _signal, _frame: stop.set())
    print(
        f"pointsman is ready: http://{config.http.host}:{cell.port} "
        f"(model {plan.served_model_name}, admin http://{config.http.admin_host}:{cell.admin_port})",
        flush=True,
    )
    failure = watch(cell, stop)
    take_down(cell, failure or "the server was asked to stop")
    if failure is not None:
        raise CellError(failure)
    return 0


def check_port(host: str, port: int, flag: str) -> None:
    """Raises ConfigError now instead of after a minute of loading."""
    if port == 0:
        return
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} {port}: cannot listen on {host}:{port}: {error.strerror}"
        ) from error


def watch(cell: Cell, stop: threading.Event) -> str | None:
    """Until `stop` (None) or until a process ends that must not (why)."""
    names = {cell.engine_ref: "the engine", cell.http_ref: "the HTTP server"}
    ranks = {ref: rank for rank, ref in enumerate(cell.worker_refs)}
    while not stop.is_set():
        ended, _ = ray.wait([*names, *ranks], timeout=WATCH_SECONDS)
        for ref in ended:
            reason = reason_of(ref)
            if ref in ranks:
                return _rank_lost(cell, ranks[ref], reason)
            if ref is cell.engine_ref:
                return f"the engine ended: {reason}"
            return f"{names[ref]} ended: {reason}"
    return None


def _rank_lost(cell: Cell, rank: int, reason: str) -> str:
    """Tells the engine, which ends every request with this error, and waits for it to have said so."""
    assert cell.link is not None
    _LOG.error("rank lost rank=%d reason=%r", rank, reason)
    cell.link.rank_lost(rank, reason)
    ray.wait([cell.engine_ref], timeout=FAREWELL_SECONDS)
    return f"rank {rank} is lost: {reason}"


def take_down(cell: Cell, reason: str) -> None:
    """HTTP first, so that nobody new comes; then the engine, which stops the workers; then whatever is left."""
    if cell.http_server is not None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(cell.http_server.stop.remote(STOP_SECONDS), timeout=STOP_SECONDS + 1)
    if cell.link is not None:
        cell.link.stop(reason)
        cell.link.close()
    refs = [ref for ref in (cell.engine_ref, *cell.worker_refs) if ref is not None]
    deadline = time.monotonic() + STOP_SECONDS
    ray.wait(refs, num_returns=len(refs), timeout=max(0.0, deadline - time.monotonic()))
    for actor in (cell.http_server, cell.engine, *cell.workers):
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)


def _on_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
