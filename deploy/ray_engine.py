"""A cell's engine as a Ray actor: what `EngineRecovery` does to it."""

import contextlib
from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions

from deploy.actor_calls import result_so_far
from deploy.actors.engine import StartedEngine
from deploy.processes import kill_process
from deploy.ray_head import RayHead
from router_service.engine_life import EngineLife


class RayEngine:
    """Owner of the actor and its endless call. `start` and `run` come first."""

    def __init__(self, make_actor: Callable[[EngineLife, str], Any], head: RayHead) -> None:
        """make_actor: with the fingerprint of the weights that it expects at its ranks"""
        self._make_actor = make_actor
        self._head = head
        self.actor: Any = None
        self.call: Any = None
        """None while no engine serves."""
        self._pid: int | None = None
        self.ports = (0, 0, 0)
        self.life = 0
        """Its number."""

    def can_start(self) -> bool:
        return self._head.answers()

    def start(self, life: EngineLife, fingerprint: str) -> Any:
        self.life = life.number
        self.actor = self._make_actor(life, fingerprint)
        return self.actor.started.remote()

    def run(self, started: StartedEngine) -> None:
        self._pid, self.ports = started.pid, started.ports
        self.call = self.actor.run.remote()

    @property
    def calls(self) -> list[Any]:
        return [] if self.call is None else [self.call]

    def kill(self) -> None:
        if self.actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self.actor)
        self.call = None
        if self._pid is not None:
            kill_process(self._pid)  # a stopped one does not hear Ray
            self._pid = None

    def pulse(self) -> Any:
        return self.actor.pulse.remote()

    def result(self, call: Any) -> tuple[bool, Any]:
        return result_so_far(call)
