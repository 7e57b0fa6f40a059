"""The plan compiler on a thread of its own, beside the engine's loop: numpy releases the GIL where it matters."""

import queue
import threading
from dataclasses import dataclass

from cluster.dispatch_plan import PlanFragment
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes
from cluster.types import Rank
from prefix_store.plan_compiler import compile_fragment


@dataclass(frozen=True)
class _Ask:
    fragment_id: int
    routes: ExpertRoutes
    source: Rank
    first_position: int


class CompilerThread:
    """Fragments in the order of the asks. What is asked is bounded by the requests that run."""

    def __init__(self, placement: ExpertPlacement) -> None:
        self._placement = placement
        self._asks: queue.SimpleQueue[_Ask | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, PlanFragment] | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="plan-compiler", daemon=True)
        self._thread.start()

    @property
    def position_period(self) -> int:
        """Of the placement."""
        return self._placement.position_period

    def submit(
        self, fragment_id: int, routes: ExpertRoutes, source: Rank, first_position: int
    ) -> None:
        self._asks.put(_Ask(fragment_id, routes, source, first_position))

    def completed(self, timeout_seconds: float) -> list[tuple[int, PlanFragment]]:
        """What is done; waits up to the timeout for the first one. Raises what the compiler raised."""
        done: list[tuple[int, PlanFragment]] = []
        try:
            while True:
                wait = timeout_seconds if not done and timeout_seconds else None
                item = self._done.get(timeout=wait) if wait else self._done.get_nowait()
                if isinstance(item, Exception):
                    raise item
                done.append(item)
        except queue.Empty:
            return done

    def close(self) -> None:
        """Ends the thread once what was asked is done."""
        self._asks.put(None)
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while (ask := self._asks.get()) is not None:
            try:
                fragment = compile_fragment(
                    ask.routes, ask.source, self._placement, first_position=ask.first_position
                )
                self._done.put((ask.fragment_id, fragment))
            except Exception as error:  # told to the engine's thread, which raises it
                self._done.put(error)
                return
