"""A run from the first request to an idle cell: who does what meanwhile, and what is found."""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.helpers.served import Served, eventually
from tests.integration.api import CellApi
from tests.soak.asks import TENANTS
from tests.soak.clients import Clients, Tally
from tests.soak.operator import Operator
from tests.soak.probes import Prober
from tests.soak.sampling import Sampler
from tests.soak.trace import due_asks, rows_of
from tests.soak.verdict import Sample, Trend, trends

PROBE_SECONDS = 20.0
IDLE_SECONDS = 4.0
"""Longer than an engine is idle before it checks its invariants."""
GONE_SECONDS = 60.0
"""After the last request: until connections that clients left are gone on the server's side too."""


@dataclass(frozen=True)
class Options:
    seconds: float
    warm_up_seconds: float
    num_clients: int
    speed: float
    sample_seconds: float
    seed: int
    traces: Path | None
    samples_file: Path | None


@dataclass(frozen=True)
class Budgets:
    """Most that a series may ever be, by its name."""

    most: dict[str, float]
    num_kv_blocks: int
    """Of the cell."""


@dataclass(frozen=True)
class Cell:
    """What runs, and what it was started with. keys: by tenant. model_dirs: whose weights it serves in turns."""

    served: Served
    api: CellApi
    state_dir: Path
    keys: dict[str, str]
    model_dirs: tuple[Path, Path]
    budgets: Budgets


@dataclass(frozen=True)
class Found:
    samples: Sequence[Sample]
    trends: Sequence[Trend]
    end: Sequence[str]
    problems: Sequence[str]


class Soak:
    """Owner of the threads."""

    def __init__(self, cell: Cell, options: Options) -> None:
        self._cell = cell
        self._options = options
        self._sampler = Sampler(cell.served, cell.api, cell.state_dir)
        self.tally = Tally()
        urls = cell.api.base_url, cell.api.admin_url
        self.prober = Prober(urls[0], cell.keys[TENANTS[0]], self.tally)
        self.operator = Operator(*urls, cell.model_dirs)
        rows = rows_of(options.traces, options.seed)
        due = due_asks(rows, options.seed, options.speed)
        self._clients = Clients(urls[0], cell.keys, due, self.tally)
        self._samples: list[Sample] = []
        self._problems: list[str] = []

    def run(self, limit_of: Callable[[str], float | None]) -> Found:
        """limit_of: most that a series may rise in ten minutes."""
        stop = threading.Event()
        threads = [
            threading.Thread(target=self.prober.run, args=(stop, PROBE_SECONDS), daemon=True),
            threading.Thread(target=self.operator.run, args=(stop,), daemon=True),
        ]
        self._clients.start(self._options.num_clients)
        for thread in threads:
            thread.start()
        self._sample()
        stop.set()
        self._clients.stop()
        for thread in threads:
            thread.join(400.0)
            assert not thread.is_alive(), "a probe or a command does not end"
        end = self._end()
        found = trends(self._samples, self._options.warm_up_seconds, limit_of)
        return Found(self._samples, found, end, self._judged(found))

    def _sample(self) -> None:
        """Raises AssertionError when the cell ends."""
        started = time.monotonic()
        while (now := time.monotonic() - started) < self._options.seconds:
            assert self._cell.served.process.poll() is None, "the cell has ended"
            with suppress(httpx.TransportError):
                self._samples.append(Sample(now, self._sampler.values()))
                self._write(self._samples[-1])
            taken = time.monotonic() - started
            time.sleep(max(0.0, now + self._options.sample_seconds - taken))

    def _write(self, sample: Sample) -> None:
        if self._options.samples_file is not None:
            with self._options.samples_file.open("a") as file:
                file.write(json.dumps({"seconds": sample.seconds, **sample.values}) + "\n")

    def _judged(self, found: Sequence[Trend]) -> list[str]:
        problems = [
            f"{trend.name} grows: {trend.slope:+.2f} in ten minutes, the limit is {trend.limit:g}"
            for trend in found
            if trend.grows
        ]
        for name, most in self._cell.budgets.most.items():
            largest = max(sample.values[name] for sample in self._samples)
            if largest > most:
                problems.append(f"{name} was {largest:g}, over its budget of {most:g}")
        problems += self._problems
        problems += [f"failed: {failure}" for failure in self.tally.failures]
        problems += [f"another answer: {answer}" for answer in self.prober.different]
        if self.operator.failure is not None:
            problems.append(f"a command failed: {self.operator.failure}")
        return problems

    # --- the end

    def _end(self) -> list[str]:
        """What an idle cell holds."""
        api = self._cell.api
        self._require(_idle(api), "requests or leases are left after the last one")
        time.sleep(IDLE_SECONDS)
        healthy = api.http.get(f"{api.base_url}/health").status_code == 200
        self._require(healthy, "not healthy after the engine has checked its invariants")
        num_clients = self._num_clients()
        self._require(not num_clients, f"{num_clients} connections of clients are left")
        before = self._sampler.values()
        api.evict("all")
        after = self._sampler.values()
        total = self._cell.budgets.num_kv_blocks
        self._require(after["engine: KV blocks free"] == total, "blocks are held by nobody")
        for what in ("store nodes", "route bytes", "score bytes", "KV blocks leased"):
            self._require(after[f"engine: {what}"] == 0, f"{what} after evicting all")
        held = ", ".join(
            f"{what} {before[f'engine: {what}']:g} → {after[f'engine: {what}']:g}"
            for what in ("KV blocks used", "KV blocks free", "store nodes", "route bytes")
        )
        return [
            "no request, no lease, no connection of a client; the engine has checked its invariants",
            f"before and after evicting all: {held}",
            *self._sampler.totals(),
            f"load average {os.getloadavg()[0]:.1f}",
        ]

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self._problems.append(otherwise)

    def _num_clients(self) -> int:
        """Connections that are left when this one has closed its own."""
        self._cell.api.http.close()
        servers = [psutil.Process(pid) for pid in self._cell.served.pids_of("HttpServer")]

        def left() -> int:
            return sum(map(self._sampler.num_clients, servers))

        with suppress(AssertionError):
            eventually(lambda: not left(), GONE_SECONDS, "the end of connections")
        self._cell.api.http = httpx.Client(timeout=60.0)
        return left()


def _idle(api: CellApi) -> bool:
    with suppress(AssertionError):
        return api.is_idle()
    return False
