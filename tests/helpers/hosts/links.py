"""A bridge on this machine and network namespaces on its ports, by iproute2. Names are unique per network."""

import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

ATTEMPTS = 20
"""To find a name and a subnet that nobody has."""
INTERFACE = "eth0"
"""Of each host."""


@dataclass(frozen=True)
class Port:
    """A namespace's end of the network. name: short, without the network's"""

    name: str
    namespace: str
    link: str
    address: str

    def down(self) -> None:
        _ip("link", "set", self.link, "down")

    def up(self) -> None:
        _ip("link", "set", self.link, "up")


@contextmanager
def network(num_ports: int) -> Iterator[list[Port]]:
    """A bridge, which has address .1, and namespaces from .10 on. Removed at the end, whatever happened; what a test
    process has left that was killed is removed by the next one."""
    _remove_abandoned()
    tag, subnet = _new_bridge()
    bridge = f"pm-{tag}"
    ports = [
        Port(f"h{i}", f"pm-{tag}-{i}", f"pm-{tag}-{i}", f"{subnet}.{10 + i}")
        for i in range(num_ports)
    ]
    try:
        for port in ports:
            _add(port, bridge)
        yield ports
    finally:
        _remove(bridge)


def _remove_abandoned() -> None:
    """A bridge tells its owner as its alias."""
    for bridge in json.loads(_ip("-json", "link", "show", "type", "bridge")):
        name, owner = bridge["ifname"], bridge.get("ifalias", "")
        if name.startswith("pm-") and owner.isdecimal() and not psutil.pid_exists(int(owner)):
            _remove(name)


def _remove(bridge: str) -> None:
    """With all that hangs on it, as far as it is there: two may remove the same abandoned one. A link is taken from
    its bridge at once, a namespace alone would take it along in a moment."""
    namespaces = [line.split()[0] for line in _ip("netns", "list").splitlines()]
    ours = [name for name in namespaces if name.startswith(f"{bridge}-")]
    commands = [("link", "del", name) for name in ours] + [("netns", "del", name) for name in ours]
    for command in [*commands, ("link", "del", bridge)]:
        subprocess.run(["ip", *command], capture_output=True)


def _new_bridge() -> tuple[str, str]:
    """Its tag and the first three numbers of its subnet, which follow from the tag."""
    taken = _ip("-4", "addr")
    for _ in range(ATTEMPTS):
        number = secrets.randbits(14)
        tag, subnet = f"{number:04x}", f"10.{64 + number // 256}.{number % 256}"
        if f"{subnet}." in taken:
            continue
        made = subprocess.run(
            ["ip", "link", "add", f"pm-{tag}", "type", "bridge"], capture_output=True, text=True
        )
        if made.returncode == 0:
            _ip("link", "set", f"pm-{tag}", "alias", str(os.getpid()))
            _ip("addr", "add", f"{subnet}.1/24", "dev", f"pm-{tag}")
            _ip("link", "set", f"pm-{tag}", "up")
            return tag, subnet
        if "File exists" not in made.stderr:
            raise AssertionError(f"no bridge: {made.stderr.strip()}")
    raise AssertionError(f"no free name for a bridge in {ATTEMPTS} attempts")


def _add(port: Port, bridge: str) -> None:
    _ip("netns", "add", port.namespace)
    _ip(
        *("link", "add", port.link, "type", "veth"),
        *("peer", "name", INTERFACE, "netns", port.namespace),
    )
    _ip("link", "set", port.link, "master", bridge, "up")
    _ip("-n", port.namespace, "addr", "add", f"{port.address}/24", "dev", INTERFACE)
    _ip("-n", port.namespace, "link", "set", INTERFACE, "up")
    _ip("-n", port.namespace, "link", "set", "lo", "up")


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
