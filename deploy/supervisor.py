"""`pointsman serve`: brings a cell up, watches it, and takes every process down again."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TextIO

import ray

from cluster.config import Config, HttpSection
from cluster.errors import CellError
from cluster.log import configure_logging, logger
from deploy.api_keys import take_http_keys
from deploy.cell_plan import CellPlan
from deploy.cell_watch import CellWatch, say
from deploy.exposure import exposures
from deploy.ground import Ground
from deploy.launch import Cell, launch_cell
from deploy.rank_map import map_lines
from deploy.ray_head import end_actors
from router_service.api_keys import HttpKeys

STOP_SECONDS = 2.0
"""HTTP server first, then engine and workers get so long to leave by themselves."""

HEAD_DRAIN_SECONDS = 15.0
"""Answers that have begun may end within this time when Ray's head is lost, before Ray's own processes give up."""

_LOG = logger("serve")


class StderrProgress:
    """One line that moves on a terminal, a line per quarter elsewhere. Also where a start looks for interrupts."""

    def __init__(self, interrupts: "Interrupts") -> None:
        self._interrupts = interrupts
        self._shown = -1

    def loading(self, fraction: float) -> None:
        self._interrupts.check()
        percent = int(100 * fraction)
        if sys.stderr.isatty():
            print(f"\rloading weights {percent:3d} %", end="", file=sys.stderr, flush=True)
            if percent >= 100:
                print(file=sys.stderr)
        elif percent // 25 > self._shown // 25:
            print(f"loading weights {percent} %", file=sys.stderr, flush=True)
        self._shown = percent


def serve(config: Config, ground: Ground) -> int:
    """Blocks until SIGINT, SIGTERM or SIGHUP and returns 0; see StopSignals. Raises KeyboardInterrupt when one comes
    during the start, CellError on failure.

    Standard output gets the ready line only; what Ray and the actors print goes to standard error.
    """
    http_keys = take_http_keys(config.http, os.environ)
    configure_logging()
    output = sys.stdout
    interrupts = Interrupts()
    on_signals(interrupts.handle)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            try:
                plan = ground.open()
                for line in exposures(config.http, http_keys):
                    say(f"pointsman: warning: {line}")
                on_signals(interrupts.handle)  # again: Ray sets its own
                return _serve_in(config, plan, http_keys, output, interrupts)
            finally:
                on_signals(_ignore)
                ground.close()
        except SystemExit:  # from Ray's own SIGTERM handler, in place while Ray starts
            raise KeyboardInterrupt from None


def _serve_in(
    config: Config,
    plan: CellPlan,
    http_keys: HttpKeys,
    output: TextIO,
    interrupts: "Interrupts",
) -> int:
    interrupts.check()
    cell = launch_cell(config, plan, StderrProgress(interrupts), http_keys)
    ports = cell.http_servers.ports
    signals = StopSignals()
    on_signals(signals.handle)
    interrupts.check()
    for line in map_lines({rank: loaded.place for rank, loaded in cell.ranks.loaded.items()}):
        say(line)
    print(
        f"pointsman is ready: {_url(config.http, config.http.host, ports.port)} (model "
        f"{plan.served_model_name}, admin {_url(config.http, config.http.admin_host, ports.admin_port)})",
        file=output,
        flush=True,
    )
    watch = CellWatch(cell, config.cell.recovery_limit_seconds)
    failure = watch.until(signals.stop)
    if failure is None:
        failure = watch.drain(config.http.drain_seconds, signals.at_once)
    elif cell.head.is_away:
        watch.drain(min(config.http.drain_seconds, HEAD_DRAIN_SECONDS), signals.at_once)
    take_down(cell, failure or "the server is stopping")
    if failure is not None:
        raise CellError(failure)
    return 0


def _url(http: HttpSection, host: str, port: int) -> str:
    scheme = "https" if http.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


# --- the end


def take_down(cell: Cell, reason: str) -> None:
    """HTTP first, so that nobody new comes; then the engine, which stops the workers; then whatever is left. What was
    reserved goes when this process leaves Ray.

    Takes at most about 4 × STOP_SECONDS, whoever hangs. Processes that are stopped (SIGSTOP) end too.
    """
    cell.http_servers.stop(STOP_SECONDS, reason)
    cell.link.stop(reason)
    cell.link.close()
    calls = [*cell.engine.calls, *cell.ranks.calls.values()]
    ray.wait(calls, num_returns=len(calls), timeout=STOP_SECONDS)
    cell.http_servers.kill()
    cell.engine.kill()
    hanging = cell.ranks.serving()
    end_actors([*cell.ranks.actors.values()], cell.head)
    cell.ranks.kill_processes(hanging, STOP_SECONDS)


def on_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    """A SIGHUP that is ignored already (nohup) stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


class StopSignals:
    """While it serves: SIGTERM and SIGHUP let the answers end that have begun. SIGINT (Ctrl-C) does not wait for them,
    and so does a second signal of any kind."""

    def __init__(self) -> None:
        self.stop, self.at_once = threading.Event(), threading.Event()

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT or self.stop.is_set():
            self.at_once.set()
        self.stop.set()


class Interrupts:
    """A signal while starting. An exception out of a handler is lost when it lands in a callback of the interpreter
    (at a fork, in a finaliser), so the wish is kept too and looked at wherever the start gets to."""

    def __init__(self) -> None:
        self._asked = False

    def handle(self, _signal: int, _frame: FrameType | None) -> None:
        self._asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        if self._asked:
            raise KeyboardInterrupt


def _ignore(_signal: int, _frame: FrameType | None) -> None:
    """The end has begun and takes bounded time."""
