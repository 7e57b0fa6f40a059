"""Clients that send what the trace asks for when it is due, as far as there are enough of them; some leave early."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from tests.soak.asks import Ask

REQUEST_SECONDS = 120.0
REQUESTS_PER_CONNECTION = 20
"""Then a client opens a new one."""
OVERLOADED_PAUSE_SECONDS = 0.2
WEIGHTS_CHANGED = "weights were exchanged"
"""In the message of an answer that they have ended, whatever the API."""


class Tally:
    """What became of requests, by how it ended and by kind. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self.failures: list[str] = []
        """The first of them, in words."""

    def count(self, outcome: str, kind: str) -> None:
        with self._lock:
            self._counts[outcome, kind] += 1

    def fail(self, kind: str, what: str) -> None:
        self.count("failed", kind)
        with self._lock:
            if len(self.failures) < 20:
                self.failures.append(f"{kind}: {what}")

    def of(self, outcome: str) -> int:
        with self._lock:
            return sum(count for (its, _), count in self._counts.items() if its == outcome)

    def table(self) -> dict[str, Counter[str]]:
        """Outcomes by kind."""
        with self._lock:
            found: dict[str, Counter[str]] = {}
            for (outcome, kind), count in self._counts.items():
                found.setdefault(kind, Counter())[outcome] += count
            return found


class Clients:
    """Owner of the threads. All take their next request from one iterator, against one clock."""

    def __init__(
        self, base_url: str, keys: dict[str, str], due: Iterator[tuple[float, Ask]], tally: Tally
    ) -> None:
        """keys: of tenants. due: requests with their times, in seconds from `start`."""
        self._base_url = base_url
        self._keys = keys
        self._due = due
        self._tally = tally
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._started = 0.0

    def start(self, number: int) -> None:
        self._started = time.monotonic()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Waits for the ends of requests that were sent."""
        self._stop.set()
        for thread in self._threads:
            thread.join(REQUEST_SECONDS + 10.0)
            assert not thread.is_alive(), "a request does not end"

    def _run(self) -> None:
        while not self._stop.is_set():
            with httpx.Client(timeout=REQUEST_SECONDS) as http:
                for _ in range(REQUESTS_PER_CONNECTION):
                    with self._lock:
                        seconds, ask = next(self._due)
                    if self._stop.wait(max(0.0, self._started + seconds - time.monotonic())):
                        return
                    self._send(http, ask)

    def _send(self, http: httpx.Client, ask: Ask) -> None:
        try:
            self._tally.count(self._outcome(http, ask), ask.kind)
        except (httpx.TransportError, AssertionError) as error:
            self._tally.fail(ask.kind, f"{type(error).__name__}: {error}")

    def _outcome(self, http: httpx.Client, ask: Ask) -> str:
        """Raises AssertionError for an answer that should be another one."""
        read = ask.leaves_after_seconds or REQUEST_SECONDS
        try:
            with http.stream(
                "POST",
                f"{self._base_url}{ask.path}",
                json=ask.body,
                headers={"authorization": f"Bearer {self._keys[ask.tenant]}"},
                timeout=httpx.Timeout(REQUEST_SECONDS, read=read),
            ) as answer:
                return self._read(answer, ask)
        except httpx.ReadTimeout:
            if ask.leaves_after_seconds is None:
                raise
            return "left"

    def _read(self, answer: httpx.Response, ask: Ask) -> str:
        if answer.status_code == 429:
            answer.read()
            self._stop.wait(OVERLOADED_PAUSE_SECONDS)
            return "sent away"
        if answer.status_code == 200 and ask.body.get("stream"):
            return self._read_stream(answer, ask)
        text = answer.read().decode()
        if answer.status_code == 503 and WEIGHTS_CHANGED in text:
            return "ended by new weights"
        if ask.is_refused:
            assert 400 <= answer.status_code < 500, f"{answer.status_code} {text[:300]}"
            return "refused"
        assert answer.status_code == 200, f"{answer.status_code} {text[:300]}"
        return "answered"

    def _read_stream(self, answer: httpx.Response, ask: Ask) -> str:
        last: Any = None
        for number, line in enumerate(filter(None, answer.iter_lines()), start=1):
            if number == ask.leaves_after_events:
                return "left"
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
                if "error" in last or last.get("type") == "error":
                    assert WEIGHTS_CHANGED in line, line[:300]
                    return "ended by new weights"
        assert last is not None, "a stream without events"
        return "answered"
