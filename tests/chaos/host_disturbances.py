"""What is done to a cell over hosts: ranks killed and frozen, hosts lost, their network cut for short and for long."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from signal import SIGKILL, SIGSTOP

from tests.helpers.hosts.host import Host
from tests.helpers.hosts.ray_on_hosts import RayOnHosts
from tests.helpers.hosts.served_on_hosts import ServedOnHosts
from tests.helpers.served import eventually

END_SECONDS = 60.0
"""In which processes of a rank that was replaced have to end, once their host is reached again."""
OFF_SECONDS = 1.0, 3.0
BRIEF_SECONDS = 0.5, 2.0
MIDDLE_SECONDS = 5.0, 9.0
"""Longer than a step may take, and about as long as Ray's patience."""
LONG_SECONDS = 14.0, 18.0
"""Ray has given the host up in any case."""


@dataclass
class HostScene:
    """hosts: the first is the head, the last ran no rank at the start"""

    hosts: Sequence[Host]
    ray: RayOnHosts
    served: ServedOnHosts
    draw: random.Random
    repairs: list[Callable[[], None]] = field(default_factory=list)
    """What makes all hosts members again; done when the streams have ended."""

    def rank_away_from_the_head(self) -> int:
        head = self.hosts[0]
        places = self.served.places
        return self.draw.choice(sorted(rank for rank in places if places[rank][0] is not head))

    def host_with_a_rank(self) -> Host:
        return self.served.places[self.rank_away_from_the_head()][0]

    def spare(self) -> Host:
        used = [host for host, _ in self.served.places.values()]
        return next(host for host in self.hosts if host not in used)


def _nothing(_scene: HostScene) -> None:
    """All hosts are members."""


@dataclass(frozen=True)
class HostKind:
    """prepare: before the streams are asked for; do: returns when all of it is done, the host reached again.
    num_groups: that the ranks meet in because of it, at least."""

    name: str
    do: Callable[[HostScene], None]
    prepare: Callable[[HostScene], None] = _nothing
    num_groups: int = 1


def _kill_rank(scene: HostScene) -> None:
    scene.served.signal_rank(scene.draw.choice(sorted(scene.served.places)), SIGKILL)


def _freeze_rank(scene: HostScene) -> None:
    scene.served.signal_rank(scene.rank_away_from_the_head(), SIGSTOP)


def _lose_host(scene: HostScene) -> None:
    """The spare one takes its rank. It comes back later, and is the spare one then."""
    host = scene.host_with_a_rank()
    host.kill()
    scene.repairs.append(lambda: _boot(scene, host))


def _take_the_spare_away(scene: HostScene) -> None:
    spare = scene.spare()
    spare.kill()
    eventually(lambda: spare not in scene.ray.members(), END_SECONDS, f"Ray without {spare.name}")
    scene.repairs.append(lambda: _boot(scene, spare))


def _lose_host_and_boot(scene: HostScene) -> None:
    """There is no other: its rank comes back where it was."""
    host = scene.host_with_a_rank()
    host.kill()
    time.sleep(scene.draw.uniform(*OFF_SECONDS))
    _boot(scene, host)


def _boot(scene: HostScene, host: Host) -> None:
    host.boot()
    scene.ray.join(host)


def _cut(seconds: tuple[float, float]) -> Callable[[HostScene], None]:
    def do(scene: HostScene) -> None:
        host = scene.host_with_a_rank()
        there = rank_processes(host)
        host.cut()
        time.sleep(scene.draw.uniform(*seconds))
        host.heal()
        scene.repairs.append(lambda: _settle(scene, host, there))

    return do


def _settle(scene: HostScene, host: Host, before: set[int]) -> None:
    """A process that was replaced meanwhile ends by itself. If Ray gave the host up, it joins anew."""
    serving = {pid for place, pid in scene.served.places.values() if place is host}
    eventually(
        lambda: rank_processes(host) <= serving or None,
        END_SECONDS,
        f"the end of replaced processes on {host.name}, where {before} were and {serving} serve",
    )
    if host not in scene.ray.members():
        eventually(lambda: not runs_ray(host), END_SECONDS, f"the end of Ray on {host.name}")
        scene.ray.join(host)


def rank_processes(host: Host) -> set[int]:
    """As the host counts them."""
    lines = host.run("ps -eo pid=,args=").splitlines()
    found = [line.split(None, 1) for line in lines]
    return {int(pid) for pid, command in found if command.startswith("ray::ExpertWorker")}


def runs_ray(host: Host) -> bool:
    return any(process.name() == "raylet" for process in host.processes())


KINDS = (
    HostKind("a rank is killed", _kill_rank),
    HostKind("a rank hangs (SIGSTOP)", _freeze_rank),
    HostKind("a host is lost, a spare one has room", _lose_host),
    HostKind("a host is lost, booted and joins again", _lose_host_and_boot, _take_the_spare_away),
    HostKind("a host is cut off for 0.5 to 2 s", _cut(BRIEF_SECONDS), num_groups=0),
    HostKind("a host is cut off for 5 to 9 s", _cut(MIDDLE_SECONDS), num_groups=0),
    HostKind("a host is cut off for 14 to 18 s", _cut(LONG_SECONDS)),
)
