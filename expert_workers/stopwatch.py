"""Seconds spent per part of a step on one rank. Passed to the collaborators that do the parts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Part = Literal["attention", "gate", "dispatch", "experts", "combine"]


class Stopwatch:
    """Owner of one rank's timings; `reset` at the start of a step. Not thread-safe."""

    def __init__(self) -> None:
        self._seconds: dict[Part, float] = {}
        self.reset()

    def reset(self) -> None:
        self._seconds = {
            "attention": 0.0,
            "gate": 0.0,
            "dispatch": 0.0,
            "experts": 0.0,
            "combine": 0.0,
        }

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - started

    def seconds(self, part: Part) -> float:
        return self._seconds[part]
