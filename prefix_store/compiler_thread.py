"""The plan compiler on a thread of its own, beside the engine's loop: numpy releases the GIL where it matters."""

import queue
import threading
from dataclasses import dataclass

from cluster.dispatch_plan import PlanFragment
from cluster.errors import PlanError
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes
from cluster.types import Rank
from prefix_store.plan_compiler import compile_fragment


@dataclass(frozen=True)
class _Ask:
    routes: ExpertRoutes
    source: Rank
    first_position: int


class CompilerThread:
    """Fragments in the order of the asks. Bounded by who asks: a running request asks for a window ahead of where it
    is, and what it has no use for any more is cancelled."""

    def __init__(self, placement: ExpertPlacement) -> None:
        self._placement = placement
        self._asks: dict[int, _Ask] = {}
        self._closing = False
        self._changed = threading.Condition()
        """Guards the asks."""
        self._done: queue.SimpleQueue[tuple[int, PlanFragment | PlanError]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="plan-compiler", daemon=True)
        self._thread.start()

    @property
    def position_period(self) -> int:
        """Of the placement."""
        return self._placement.position_period

    def submit(
        self, fragment_id: int, routes: ExpertRoutes, source: Rank, first_position: int
    ) -> None:
        with self._changed:
            self._asks[fragment_id] = _Ask(routes, source, first_position)
            self._changed.notify()

    def cancel(self, fragment_id: int) -> None:
        """Unless it has been begun: then it is completed as if nobody had cancelled."""
        with self._changed:
            self._asks.pop(fragment_id, None)

    def completed(self, timeout_seconds: float) -> list[tuple[int, PlanFragment | PlanError]]:
        """What is done, or why it cannot be; waits up to the timeout for the first one."""
        done: list[tuple[int, PlanFragment | PlanError]] = []
        try:
            while True:
                wait = timeout_seconds if not done and timeout_seconds else None
                done.append(self._done.get(timeout=wait) if wait else self._done.get_nowait())
        except queue.Empty:
            return done

    def close(self) -> None:
        """Ends the thread once what was asked is done."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while (item := self._next_ask()) is not None:
            fragment_id, ask = item
            self._done.put((fragment_id, self._compile(ask)))

    def _next_ask(self) -> tuple[int, _Ask] | None:
        """Waits for one without a deadline: the thread has nothing else to do. None once it shall end."""
        with self._changed:
            self._changed.wait_for(lambda: self._asks or self._closing)
            if not self._asks:
                return None
            fragment_id = next(iter(self._asks))
            return fragment_id, self._asks.pop(fragment_id)

    def _compile(self, ask: _Ask) -> PlanFragment | PlanError:
        try:
            return compile_fragment(
                ask.routes, ask.source, self._placement, first_position=ask.first_position
            )
        except PlanError as error:
            return error
        except Exception as error:  # whatever it is, the tokens can travel without a plan
            failure = PlanError(f"{type(error).__name__}: {error}".partition("\n")[0])
            failure.__cause__ = error
            return failure
