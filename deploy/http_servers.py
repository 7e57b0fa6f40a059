"""The HTTP servers of a cell: actors that share a pair of ports. One that ends loses its own connections and is started
again while the others go on, and so is one that hangs."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions

from cluster.log import logger
from deploy.actor_calls import end_of, result_of, result_so_far
from deploy.actors.http_server import StartedHttpServer
from deploy.processes import kill_process
from deploy.pulse import HANG_SECONDS, Pulse, killed_after
from router_service.http_server import BoundPorts

START_PAUSE_SECONDS = 5.0
"""At least so long between two starts of one server, so that one that always ends does not keep the host busy."""
START_SECONDS = 60.0
"""So long may a server take that is started again, and twice as long after each start that failed; as the pause before
the next one."""
MAX_DOUBLINGS = 4
MAX_SLOW_STARTS = 3
"""In a row of one server, until a cell that no other serves is given up."""

_LOG = logger("serve")


@dataclass
class _Server:
    """call: the actor's `start`, then its endless `run`; pid: None until it serves; kill_reason: why it was killed"""

    actor: Any
    call: Any
    started_seconds: float
    num_failed_starts: int
    """In a row, right before this one."""
    pulse: Pulse
    pid: int | None = None
    kill_reason: str | None = None

    @property
    def limit_seconds(self) -> float:
        """Of its start."""
        return START_SECONDS * _backoff(self.num_failed_starts)


@dataclass(frozen=True)
class _NextStart:
    due_seconds: float
    num_failed_starts: int


class HttpServers:
    """Owner of the actors. `start` comes first; then whoever watches `calls` brings what has ended to `take`, and asks
    for `start_due` and `end_overdue` now and then."""

    def __init__(
        self,
        make_actor: Callable[[], Any],
        num_servers: int,
        *,
        kill_actor: Callable[[Any], None] | None = None,
        kill_process: Callable[[int], None] = kill_process,
        result: Callable[[Any], tuple[bool, Any]] = result_so_far,
        can_start: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """can_start: whether `make_actor` would not wait"""
        self._make_actor = make_actor
        self._num_servers = num_servers
        self._kill_actor = kill_actor or _kill
        self._kill_process = kill_process
        self._result = result
        self._can_start = can_start
        self._clock = clock
        self._servers: list[_Server] = []
        self._next_starts: list[_NextStart] = []
        """Of those that have ended."""
        self.ports = BoundPorts(0, 0)

    def start(self, ports: BoundPorts, deadline: float) -> None:
        """Returns when all serve. The first takes `ports`, 0 being any free one, the others what it has got.

        Raises CellError, DeadlineError.
        """
        self.ports = ports
        actors = [self._make_actor() for _ in range(self._num_servers)]
        for group in (actors[:1], actors[1:]):
            starting = [self._begin(actor) for actor in group]
            for server in starting:
                self._serve(server, result_of(server.call, deadline, "the HTTP server"))

    @property
    def calls(self) -> list[Any]:
        """That end when a server serves or has ended."""
        return [server.call for server in self._servers]

    def take(self, call: Any) -> str | None:
        """Goes on with the server of an ended call. Returns why the cell cannot be served any more: a server that
        does not start while no other serves."""
        server = next(server for server in self._servers if server.call == call)
        if server.pid is None:
            with contextlib.suppress(ray.exceptions.RayError):
                self._serve(server, ray.get(call, timeout=1.0))
                return None
        reason = server.kill_reason or end_of(call).reason
        if server.pid is None and not self._others_serve(server):
            self._remove(server)
            return f"the HTTP server ended: {reason}"
        self._start_later(server, reason)
        return None

    def start_due(self) -> None:
        """Starts again what has waited for it."""
        now = self._clock()
        due = [start for start in self._next_starts if start.due_seconds <= now]
        if not due or not self._can_start():
            return
        self._next_starts = [start for start in self._next_starts if start.due_seconds > now]
        for start in due:
            self._begin(self._make_actor(), start.num_failed_starts)

    def end_overdue(self) -> str | None:
        """Gives up starts that take too long: a constructor that hangs, or Ray finds no place for the actor. They are
        tried again. Returns why the cell cannot be served any more, as `take` does, after several of them."""
        now = self._clock()
        starting = [server for server in self._servers if server.pid is None]
        for server in [s for s in starting if now > s.started_seconds + s.limit_seconds]:
            num_slow = server.num_failed_starts + 1
            reason = f"did not start within {server.limit_seconds:.0f} s (attempt {num_slow})"
            if num_slow >= MAX_SLOW_STARTS and not self._others_serve(server):
                self._remove(server)
                return f"the HTTP server {reason}"
            self._start_later(server, reason)
        return None

    def end_hanging(self) -> None:
        """Kills those that serve and give no sign of life; what follows is that of any other death."""
        for server in self._servers:
            if server.pid is not None and server.pulse.hangs():
                server.kill_reason = killed_after(HANG_SECONDS)
                _LOG.error("http server hangs pid=%d reason=%r", server.pid, server.kill_reason)
                self._kill_process(server.pid)
                server.pulse.begin()

    def drain(self, seconds: float) -> list[Any]:
        """All servers take nothing new; the calls end when their answers have, or after `seconds`. None is started
        again, and those that do not serve yet are ended."""
        self._next_starts.clear()
        for server in [s for s in self._servers if s.pid is None]:
            self._remove(server)
        return [server.actor.drain.remote(seconds) for server in self._servers]

    def stop(self, seconds: float, reason: str) -> None:
        """Ends open streams with `reason`, all servers at once, and then the processes."""
        self._next_starts.clear()
        stops = [s.actor.stop.remote(seconds, reason) for s in self._servers if s.pid is not None]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=seconds + 1)

    def kill(self) -> None:
        """Also those that are stopped, which do not hear Ray."""
        while self._servers:
            server = self._servers.pop()
            has_ended, failure = self._result(server.call)
            is_there = (
                has_ended or failure is None
            )  # else its number may be another process's by now
            self._kill_actor(server.actor)
            if server.pid is not None and is_there:
                self._kill_process(server.pid)

    def _begin(self, actor: Any, num_failed_starts: int = 0) -> _Server:
        call = actor.start.remote(self.ports)
        pulse = Pulse(actor.pulse.remote, self._result, clock=self._clock)
        server = _Server(actor, call, self._clock(), num_failed_starts, pulse)
        self._servers.append(server)
        return server

    def _serve(self, server: _Server, started: StartedHttpServer) -> None:
        self.ports = started.ports
        server.pid = started.pid
        server.pulse.begin()
        server.call = server.actor.run.remote()
        _LOG.info("http server serves pid=%d port=%d", started.pid, started.ports.port)

    def _others_serve(self, server: _Server) -> bool:
        return any(other.pid is not None for other in self._servers if other is not server)

    def _remove(self, server: _Server) -> None:
        self._servers.remove(server)
        self._kill_actor(server.actor)

    def _start_later(self, server: _Server, reason: str) -> None:
        self._remove(server)
        if server.pid is not None:
            next_start = _NextStart(server.started_seconds + START_PAUSE_SECONDS, 0)
        else:
            num_failed = server.num_failed_starts + 1
            pause = START_PAUSE_SECONDS * _backoff(num_failed)
            next_start = _NextStart(self._clock() + pause, num_failed)
        self._next_starts.append(next_start)
        _LOG.warning(
            "http server lost pid=%s reason=%r starts_again_in=%.0f",
            server.pid,
            reason,
            max(next_start.due_seconds - self._clock(), 0.0),
        )


def _backoff(num_failed_starts: int) -> int:
    return 1 << min(num_failed_starts, MAX_DOUBLINGS)


def _kill(actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor)
