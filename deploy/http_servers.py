"""The HTTP servers of a cell: actors that share a pair of ports. One that ends loses its own connections and is started
again while the others go on."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions

from cluster.log import logger
from deploy.actor_calls import End, end_of, result_of
from deploy.actors.http_server import StartedHttpServer
from router_service.http_server import BoundPorts

START_PAUSE_SECONDS = 5.0
"""At least so long between two starts of one server, so that one that always ends does not keep the host busy."""

_LOG = logger("serve")


@dataclass
class _Server:
    """call: the actor's `start`, then its endless `run`; pid: None until it serves"""

    actor: Any
    call: Any
    started_seconds: float
    pid: int | None = None


class HttpServers:
    """Owner of the actors. `start` comes first; then whoever watches `calls` brings what has ended to `take`."""

    def __init__(self, make_actor: Callable[[], Any], num_servers: int) -> None:
        self._make_actor = make_actor
        self._num_servers = num_servers
        self._servers: list[_Server] = []
        self._due_seconds: list[float] = []
        """When to start those that have ended."""
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
        return self._end(server, end_of(call))

    def start_due(self) -> None:
        """Starts again what has waited for it."""
        now = time.monotonic()
        due = [seconds for seconds in self._due_seconds if seconds <= now]
        self._due_seconds = [seconds for seconds in self._due_seconds if seconds > now]
        for _ in due:
            self._begin(self._make_actor())

    def stop(self, seconds: float, reason: str) -> None:
        """Ends open streams with `reason`, all servers at once, and then the processes."""
        self._due_seconds.clear()
        stops = [s.actor.stop.remote(seconds, reason) for s in self._servers if s.pid is not None]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=seconds + 1)

    def kill(self) -> None:
        while self._servers:
            _kill(self._servers.pop().actor)

    def _begin(self, actor: Any) -> _Server:
        server = _Server(actor, actor.start.remote(self.ports), time.monotonic())
        self._servers.append(server)
        return server

    def _serve(self, server: _Server, started: StartedHttpServer) -> None:
        self.ports = started.ports
        server.pid = started.pid
        server.call = server.actor.run.remote()
        _LOG.info("http server serves pid=%d port=%d", started.pid, started.ports.port)

    def _end(self, server: _Server, end: End) -> str | None:
        self._servers.remove(server)
        _kill(server.actor)
        if server.pid is None and all(other.pid is None for other in self._servers):
            return f"the HTTP server ended: {end.reason}"
        _LOG.warning("http server lost pid=%s reason=%r", server.pid, end.reason)
        self._due_seconds.append(server.started_seconds + START_PAUSE_SECONDS)
        return None


def _kill(actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor)
