"""What an operator does to a cell that is used: evictions, switches, other weights, scrapes."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

PARTS = ("kv", "routes", "scores", "kv", "all")
EVICT_SECONDS, SWITCH_SECONDS, WEIGHTS_SECONDS, SCRAPE_SECONDS = 37.0, 61.0, 241.0, 2.0
UPDATE_SECONDS = 300.0
"""Deadline of an exchange of weights."""
_SWITCHES = ("route_replay", "planned_dispatch", "prefix_store")


@dataclass
class _Chore:
    seconds: float
    do: Callable[[int], None]
    due: float
    number: int = 0


class Operator:
    """One thread, one thing after the other. Whatever is refused or fails ends the run: the clients see no reason."""

    def __init__(self, base_url: str, admin_url: str, model_dirs: tuple[Path, Path]) -> None:
        """model_dirs: whose weights are served in turns, those that are served now first."""
        self._base_url = base_url
        self._admin_url = admin_url
        self._model_dirs = model_dirs
        self.done: Counter[str] = Counter()
        self.failure: str | None = None

    def run(self, stop: threading.Event) -> None:
        now = time.monotonic()
        chores = [
            _Chore(seconds, do, now + seconds)
            for seconds, do in (
                (SCRAPE_SECONDS, self._scrape),
                (EVICT_SECONDS, self._evict),
                (SWITCH_SECONDS, self._switch),
                (WEIGHTS_SECONDS, self._update),
            )
        ]
        try:
            while not stop.wait(max(0.0, min(c.due for c in chores) - time.monotonic())):
                chore = min(chores, key=lambda chore: chore.due)
                chore.do(chore.number)
                chore.number += 1
                chore.due = time.monotonic() + chore.seconds
            self._set(dict.fromkeys(_SWITCHES, True))
        except (httpx.HTTPError, AssertionError) as error:
            self.failure = f"{type(error).__name__}: {error}"

    def _scrape(self, _number: int) -> None:
        """As a Prometheus and a load balancer do."""
        for path in ("/metrics", "/health"):
            httpx.get(f"{self._base_url}{path}", timeout=30.0)
        self.done["scrapes"] += 1

    def _evict(self, number: int) -> None:
        part = PARTS[number % len(PARTS)]
        self._post("evict", {"part": part}, 30.0)
        self.done[f"evictions of {part}"] += 1

    def _switch(self, number: int) -> None:
        """One off, the others on."""
        off = _SWITCHES[number // 2 % len(_SWITCHES)] if number % 2 == 0 else None
        self._set({name: name != off for name in _SWITCHES})
        self.done["switched features"] += 1

    def _set(self, states: dict[str, bool]) -> None:
        self._post("features", states, 30.0)

    def _update(self, number: int) -> None:
        body = {
            "model_dir": str(self._model_dirs[(number + 1) % 2]),
            "running": ("restart", "abort")[number % 2],
        }
        self._post("weights", body, UPDATE_SECONDS)
        self.done["weights exchanged"] += 1

    def _post(self, command: str, body: dict[str, Any], seconds: float) -> None:
        answer = httpx.post(f"{self._admin_url}/admin/{command}", json=body, timeout=seconds)
        assert answer.status_code == 200, f"{command} {body}: {answer.status_code} {answer.text}"
