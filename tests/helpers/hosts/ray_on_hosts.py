"""Ray on the hosts of a fleet, by the commands of the cluster file that is shipped but without `ray up`: a host that
was lost comes back when the test says so."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from tests.helpers.hosts.cluster_files import write_cluster_file
from tests.helpers.hosts.fleet import REPOSITORY, Fleet
from tests.helpers.hosts.host import Host

START_SECONDS = 120.0
_MEMBERS = """
import ray
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
print(*(host["NodeManagerAddress"] for host in ray.nodes() if host["Alive"]))
"""
_AUTOSCALER = " --autoscaling-config=~/ray_bootstrap_config.yaml"
"""Only `ray up` writes this file."""


class RayOnHosts:
    """The first host is the head."""

    def __init__(self, fleet: Fleet, hosts: Sequence[Host], *, ranks_per_host: int) -> None:
        self._hosts = list(hosts)
        file = write_cluster_file(fleet, self._hosts, ranks_per_host=ranks_per_host)
        commands = yaml.safe_load(file.read_text())
        self._head: list[str] = commands["head_start_ray_commands"]
        self._worker: list[str] = commands["worker_start_ray_commands"]
        self._token = fleet.directory / "auth_token"

    def start(self) -> None:
        """On all hosts."""
        token = self._hosts[0].home / ".ray" / "auth_token"
        self._hosts[0].run(f"{_ray()} get-auth-token --generate", START_SECONDS)
        shutil.copy(token, self._token)
        self._run(self._hosts[0], [command.replace(_AUTOSCALER, "") for command in self._head])
        with ThreadPoolExecutor(len(self._hosts)) as pool:
            list(pool.map(self.join, self._hosts[1:]))

    def join(self, host: Host) -> None:
        """One that Ray does not run on, or whose Ray was told that it is dead."""
        (host.home / ".ray").mkdir(exist_ok=True)
        shutil.copy(self._token, host.home / ".ray" / "auth_token")
        self._run(host, self._worker)

    def members(self) -> list[Host]:
        """Hosts that Ray takes for alive."""
        command = f"RAY_AUTH_MODE=token {shlex.quote(sys.executable)} -c {shlex.quote(_MEMBERS)}"
        addresses = self._hosts[0].run(command, START_SECONDS).split()
        return [host for host in self._hosts if host.address in addresses]

    def _run(self, host: Host, commands: Sequence[str]) -> None:
        settings = f"export RAY_HEAD_IP={self._hosts[0].address} PYTHONPATH={REPOSITORY}"
        for command in commands:
            _retried(host, f"{settings}; {command}")


def _retried(host: Host, command: str) -> None:
    """Once: Ray gives a host 30 s to start, which a busy machine may exceed."""
    try:
        host.run(command, START_SECONDS)
    except (AssertionError, subprocess.TimeoutExpired):
        host.run(command, START_SECONDS)


def _ray() -> str:
    return shlex.quote(str(Path(sys.executable).parent / "ray"))
