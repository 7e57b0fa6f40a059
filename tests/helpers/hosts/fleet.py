"""Hosts for a test, made of this machine: they reach each other by ssh, can be cut off, killed and booted again.

Needs root, iproute2, util-linux and an sshd. Leaves nothing behind.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.helpers.hosts.host import Host
from tests.helpers.hosts.links import network

_PARENT = Path("/var/tmp")  # not /tmp, which each host has for itself
REPOSITORY = Path(__file__).parents[3]
_SSHD_CONFIG = """\
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/authorized_keys
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
MaxSessions 100
"""


@dataclass(frozen=True)
class Fleet:
    """key: opens every host for root; it is also the hosts' own, so that they reach each other"""

    hosts: list[Host]
    key: Path
    directory: Path


@contextmanager
def fleet_of(num_hosts: int) -> Iterator[Fleet]:
    """Booted hosts h0, h1, …"""
    _remove_abandoned()
    directory = Path(tempfile.mkdtemp(prefix=f"hosts-{os.getpid()}-", dir=_PARENT))
    try:
        with network(num_hosts) as ports:
            key = _write_keys(directory)
            names = "".join(f"{port.address} {port.name}\n" for port in ports)
            (directory / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
            hosts = [Host(port, directory / port.name, _shared()) for port in ports]
            try:
                for host in hosts:
                    host.start()
                for host in hosts:
                    host.wait_until_up()
                yield Fleet(hosts, key, directory)
            finally:
                for host in hosts:
                    host.kill()
    finally:
        shutil.rmtree(directory)


def _remove_abandoned() -> None:
    """Of test processes that were killed."""
    for directory in _PARENT.glob("hosts-*-*"):
        owner = directory.name.split("-")[1]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(directory, ignore_errors=True)


def _write_keys(directory: Path) -> Path:
    for name in ("host_key", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True
        )
    shutil.copy(directory / "key.pub", directory / "authorized_keys")
    (directory / "sshd_config").write_text(_SSHD_CONFIG.format(directory=directory))
    return directory / "key"


def _shared() -> list[Path]:
    """What Python needs and lies under /tmp, which each host has for itself."""
    needed = {REPOSITORY, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    return sorted(path for path in needed if path.is_relative_to("/tmp"))
