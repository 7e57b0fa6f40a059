"""A cell's ranks as Ray actors: what `RankRecovery` does to them."""

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.log import logger
from deploy.actor_calls import end_of, result_so_far
from deploy.actors.expert_worker import LoadedRank
from deploy.processes import kill_process
from deploy.ray_head import RayHead, tell_to_exit

_LOG = logger("launch")


class RayRanks:
    """Owner of the actors and their endless calls from the start on."""

    def __init__(
        self,
        make_actor: Callable[[int], Any],
        endpoints: tuple[str, str],
        timeout_seconds: float,
        *,
        engine_life: Callable[[], int],
        head: RayHead,
        result: Callable[[Any], tuple[bool, Any]] = result_so_far,
    ) -> None:
        """endpoints: of the engine, for workers and for routes. timeout_seconds: to join a group. engine_life: of the
        engine that is there, or comes next."""
        self._make_actor = make_actor
        self._endpoints = endpoints
        self._timeout_seconds = timeout_seconds
        self._engine_life = engine_life
        self._head = head
        self._result = result
        self.actors: dict[int, Any] = {}
        self.calls: dict[int, Any] = {}
        """Of those that serve; one that ends means that the process did, or could not go on."""
        self.loaded: dict[int, LoadedRank] = {}

    def can_replace(self) -> bool:
        return self._head.answers()

    def start(self, rank: int) -> Any:
        self.actors[rank] = self._make_actor(rank)
        return self.pulse(rank)

    def kill(self, rank: int) -> None:
        self.calls.pop(rank, None)
        self._kill_actor(rank)
        loaded = self.loaded.get(rank)
        if loaded is None:
            return
        _LOG.warning("rank killed rank=%d pid=%d host=%s", rank, loaded.pid, loaded.place.host)
        if _is_here(loaded) or self._head.answers():
            _kill_process(loaded)
        else:
            tell_to_exit(self.actors[rank])

    def serving(self) -> list[int]:
        """Ranks whose endless call goes on: when all were told to stop, those that hang."""
        return [rank for rank, call in self.calls.items() if self._result(call) == (False, None)]

    def kill_processes(self, ranks: Collection[int], seconds: float) -> None:
        """Of ranks that serve. Waits at most so long for those on other hosts; without the head nobody reaches them."""
        loaded = [self.loaded[rank] for rank in ranks]
        kills = [_kill_process(one) for one in loaded if _is_here(one) or self._head.answers()]
        calls = [call for call in kills if call is not None]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=seconds)

    def _kill_actor(self, rank: int) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.actors[rank])

    def host_rendezvous(self, rank: int) -> Any:
        return self.actors[rank].host_rendezvous.remote(self._timeout_seconds)

    def let_go(self, rank: int, lost: Collection[int]) -> Any:
        return self.actors[rank].let_go.remote(self._gone_hosts(lost))

    def _gone_hosts(self, lost: Collection[int]) -> tuple[str, ...]:
        """Where ranks are lost and none lives. This host lives: all go on talking to the engine on it."""
        hosts = {rank: loaded.place.host for rank, loaded in self.loaded.items()}
        live = {host for rank, host in hosts.items() if rank not in lost}
        gone = {hosts[rank] for rank in lost if rank in hosts}
        return tuple(sorted(gone - live - {ray.util.get_node_ip_address()}))

    def load(self, rank: int, model_dir: str) -> Any:
        self.loaded.pop(rank, None)
        return self.actors[rank].load.remote(model_dir)

    def join(self, rank: int, address: str, port: int) -> Any:
        return self.actors[rank].join.remote(address, port, self._timeout_seconds)

    def run(self, rank: int, generation: int, loaded: LoadedRank) -> None:
        self.loaded[rank] = loaded
        _LOG.info(
            "rank ready rank=%d pid=%d host=%s device=%s",
            *(rank, loaded.pid, loaded.place.host, loaded.place.device),
        )
        self.calls[rank] = self.actors[rank].run.remote(
            *self._endpoints, generation, self._engine_life()
        )

    def pulse(self, rank: int) -> Any:
        return self.actors[rank].pulse.remote()

    def result(self, call: Any) -> tuple[bool, Any]:
        return self._result(call)

    def take_ended(self, call: Any) -> tuple[int, str] | None:
        """The rank whose endless call this is, and why it has ended."""
        for rank, known in self.calls.items():
            if known == call:
                del self.calls[rank]
                loaded, end = self.loaded[rank], end_of(call)
                if end.kind != "died":  # it lives on, in the place and with the memory of the next
                    self.kill(rank)
                self._kill_actor(rank)  # and of one that died, Ray may only have lost sight
                return rank, f"{end.reason} (pid {loaded.pid} on {loaded.place.host})"
        return None


def _is_here(loaded: LoadedRank) -> bool:
    return bool(loaded.place.host == ray.util.get_node_ip_address())


def _kill_process(loaded: LoadedRank) -> Any | None:
    """A stopped one does not hear Ray. Gives the call that does it on another host, None where it is done."""
    if _is_here(loaded):
        kill_process(loaded.pid)
        return None
    there = NodeAffinitySchedulingStrategy(loaded.node_id, soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": there}
    return ray.remote(kill_process).options(**options).remote(loaded.pid)
