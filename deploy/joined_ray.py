"""A Ray cluster that somebody else runs: waits for its hosts, looks at each of them, and only then plans the cell."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import ClusterSection, Config
from cluster.errors import CellError, ConfigError, DeadlineError
from cluster.log import logger
from deploy.actor_calls import result_of
from deploy.cell_plan import CellPlan
from deploy.ground import tell_start
from deploy.host_fit import memory_shortfalls
from deploy.launch import cell_demand
from deploy.planning import model_dir_of, plan_cell_on
from deploy.ports import port_problems
from deploy.preflight import Findings, HostFacts, Unreached, failures
from deploy.probe import Listener, Probe
from deploy.reservation import total_rooms
from deploy.room import CellDemand, HostRoom, host_shares, shortage
from expert_workers.device import HostDevices

LOOK_SECONDS = 1.0
PROBE_SECONDS = 180.0
"""For all hosts at once: a process starts on each, and the model directory is read."""
PROBE_LIMIT = f"{PROBE_SECONDS:g} s, for all hosts at once"
_LOG = logger("ray")


@dataclass(frozen=True)
class _Probed:
    room: HostRoom
    actor: Any


class JoinedRay:
    """Owner of this process's connection; the cluster's own processes stay."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def open(self) -> CellPlan:
        """Raises CellError when the cluster or a host of it is not there, ConfigError with every failed check."""
        _connect(self._config.cluster.address)
        _wait_for_hosts(self._config.cluster)
        rooms = total_rooms()
        found = _look(rooms, model_dir_of(self._config).resolve(), self._front_lines())
        for failure in _all_lines(failures(found)):
            raise ConfigError(failure)
        num_gpus = int(sum(room.gpus for room in rooms))
        plan = plan_cell_on(self._config, HostDevices("cuda" if num_gpus else "cpu", num_gpus))
        demand = cell_demand(plan, self._config.http.servers)
        for line in _all_lines(misfits(plan, demand, rooms, found.facts)):
            raise ConfigError(line)
        for warning in plan.warnings:
            print(f"pointsman: warning: {warning}", file=sys.stderr)
        _LOG.info("preflight passed hosts=%d gpus=%d", len(rooms), num_gpus)
        tell_start(plan)
        return plan

    def close(self) -> None:
        ray.shutdown()

    def _front_lines(self) -> tuple[str, ...]:
        return port_problems(self._config.http)


def _connect(address: str) -> None:
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=True)
    except Exception as error:  # of Ray: ConnectionError, RuntimeError, its own ones
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CellError(
            f"no Ray cluster joined at {address}: {reason}; start one (pointsman up, ray start --head), with "
            "RAY_AUTH_MODE=token and the same ~/.ray/auth_token there and here"
        ) from error


def _wait_for_hosts(cluster: ClusterSection) -> None:
    deadline = time.monotonic() + cluster.hosts_timeout_seconds
    while missing := missing_hosts(cluster, [room.address for room in total_rooms()]):
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{missing} after {cluster.hosts_timeout_seconds:g} s: look at Ray's log there "
                "(/tmp/ray/session_latest/logs) and on the head (monitor.log)"
            )
        time.sleep(LOOK_SECONDS)


def missing_hosts(cluster: ClusterSection, addresses: Sequence[str]) -> str:
    """What a start waits for, in one line; empty when all hosts are there."""
    absent = [host for host in cluster.hosts if host not in addresses]
    if absent:
        return f"no Ray on host {', '.join(absent)}"
    if len(addresses) < cluster.num_hosts:
        return f"{len(addresses)} of {cluster.num_hosts} hosts are there ({', '.join(addresses)})"
    return ""


def _look(rooms: Sequence[HostRoom], model_dir: Path, on_front: tuple[str, ...]) -> Findings:
    """A probe on each host, all at once; a host that does not answer is a finding."""
    deadline = time.monotonic() + PROBE_SECONDS
    probes = [_Probed(room, _probe_on(room)) for room in rooms]
    silent: dict[str, str] = {}
    facts: dict[str, HostFacts] = _ask(
        probes, lambda p: p.actor.facts.remote(model_dir, int(p.room.gpus)), deadline, silent
    )
    listeners: dict[str, Listener] = {}
    unreached: list[Unreached] = []
    if len(rooms) > 1:
        answering = [p for p in probes if p.room.address in facts]
        listeners = _ask(answering, lambda p: p.actor.listen.remote(), deadline, silent)
        tried = _ask(
            answering, lambda p: p.actor.unreached.remote(_others(listeners, p)), deadline, silent
        )
        unreached = [
            Unreached(source, target, reason)
            for source, reasons in tried.items()
            for target, reason in reasons.items()
        ]
    for probe in probes:
        ray.kill(probe.actor)
    front_id = ray.get_runtime_context().get_node_id()
    front = next(room.address for room in rooms if room.host_id == front_id)
    return Findings(front, tuple(facts.values()), silent, tuple(unreached), on_front)


def _probe_on(room: HostRoom) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id=room.host_id, soft=False)
    return ray.remote(Probe).options(num_cpus=0, scheduling_strategy=strategy).remote(room.address)


def _ask(
    probes: Sequence[_Probed],
    call: Callable[[_Probed], Any],
    deadline: float,
    silent: dict[str, str],
) -> dict[str, Any]:
    """Answers by address; the others are added to `silent`."""
    answers: dict[str, Any] = {}
    for probe, ref in [(probe, call(probe)) for probe in probes]:
        try:
            answers[probe.room.address] = result_of(ref, deadline, "the probe", PROBE_LIMIT)
        except CellError as error:
            silent[probe.room.address] = str(error)
    return answers


def _others(listeners: dict[str, Listener], probe: _Probed) -> dict[str, Listener]:
    return {address: x for address, x in listeners.items() if address != probe.room.address}


def misfits(
    plan: CellPlan, demand: CellDemand, rooms: Sequence[HostRoom], facts: Sequence[HostFacts]
) -> tuple[str, ...]:
    """Too few CPUs or GPUs in all, or too little memory for a host's ranks or for the engine: one line each."""
    shares = host_shares(rooms, demand)
    if shares is None:
        return (shortage(rooms, rooms, demand),)
    addresses = {room.host_id: room.address for room in rooms}
    memory = {f.address: f.memory_bytes for f in facts}
    return tuple(
        f"host {addresses[share.host_id]}: {line}"
        for share in shares
        for line in memory_shortfalls(
            plan,
            memory[addresses[share.host_id]],
            num_ranks=share.num_ranks,
            has_engine=share.has_front,
        )
    )


def _all_lines(lines: Sequence[str]) -> Sequence[str]:
    """All but the last are printed; who raises that one has told them all."""
    for line in lines[:-1]:
        print(f"pointsman: {line}", file=sys.stderr, flush=True)
    return lines[-1:]
