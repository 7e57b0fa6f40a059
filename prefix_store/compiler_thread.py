"""The plan compiler on a thread of its own, beside the engine's loop: numpy releases the GIL where it matters."""

import queue
import threading

from cluster.dispatch_plan import PlanFragment
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes
from cluster.types import Rank
from prefix_store.plan_compiler import compile_fragment

_Ask = tuple[int, ExpertRoutes, Rank]


class CompilerThread:
    """Fragments in the order of the asks. What is asked is bounded by the requests that run."""

    def __init__(self, placement: ExpertPlacement) -> None:
        self._placement = placement
        self._asks: queue.SimpleQueue[_Ask | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, PlanFragment] | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="plan-compiler", daemon=True)
        self._thread.start()

    def submit(self, fragment_id: int, routes: ExpertRoutes, source: Rank) -> None:
        self._asks.put((fragment_id, routes, source))

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
            fragment_id, routes, source = ask
            try:
                fragment = compile_fragment(routes, source, self._placement)
                self._done.put((fragment_id, fragment))
            except Exception as error:  # told to the engine's thread, which raises it
                self._done.put(error)
                return
