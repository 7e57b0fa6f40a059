"""A call by three clocks, which tell waiting for a core and Python's garbage collector from its own work."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class CallTime:
    """Microseconds. wall: that passed; cpu: of this thread; garbage: the collector's part of cpu."""

    wall: float
    cpu: float
    garbage: float

    def __add__(self, other: "CallTime") -> "CallTime":
        return CallTime(self.wall + other.wall, self.cpu + other.cpu, self.garbage + other.garbage)


class CallClock:
    """Measures calls of one thread, one at a time. Collections count while `watching`."""

    def __init__(self) -> None:
        self._garbage_ns = 0
        self._collection_began_ns = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        gc.callbacks.append(self._on_collection)
        try:
            yield
        finally:
            gc.callbacks.remove(self._on_collection)

    def time(self, call: Callable[[], T]) -> tuple[T, CallTime]:
        """The wall clock is read inside of the others, whose reading takes longer."""
        garbage = self._garbage_ns
        cpu = time.thread_time_ns()
        wall = time.perf_counter_ns()
        result = call()
        wall = time.perf_counter_ns() - wall
        cpu = time.thread_time_ns() - cpu
        garbage = self._garbage_ns - garbage
        return result, CallTime(wall / 1000, cpu / 1000, garbage / 1000)

    def _on_collection(self, phase: str, _details: dict[str, int]) -> None:
        now = time.thread_time_ns()
        if phase == "start":
            self._collection_began_ns = now
        else:
            self._garbage_ns += now - self._collection_began_ns
