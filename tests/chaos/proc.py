"""What Linux tells of a process: what the threads of a rank wait for, where an engine listens, whom an HTTP server
has accepted."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.streams import Address
from tests.helpers.served import eventually

_LOOK_SECONDS = 0.03
"""Between two looks at threads that seem to wait."""


@dataclass(frozen=True)
class _Thread:
    state: str
    waits_in: str
    """The kernel's function, "0" where it does not tell."""
    ticks: int
    """Of processor time."""


def waits_in_exchange(pid: int) -> bool:
    """A rank that has a step and waits for a peer: all of its own threads sleep, and none of them at the socket on
    which it waits for the next step."""
    first = _own_threads(pid)
    time.sleep(_LOOK_SECONDS)
    if first != _own_threads(pid) or any(thread.state != "S" for thread in first):
        return False
    assert all(t.waits_in != "0" for t in first), "run it as root: where do threads wait?"
    return not any(thread.waits_in.startswith("poll_") for thread in first)


def _own_threads(pid: int) -> list[_Thread]:
    """Those that Ray has named after the actor, of which one runs the steps."""
    threads = []
    for directory in sorted(Path(f"/proc/{pid}/task").iterdir()):
        if (directory / "comm").read_text().startswith("ray::ExpertWork"):
            fields = (directory / "stat").read_text().rpartition(") ")[2].split()
            waits_in = (directory / "wchan").read_text()
            threads.append(_Thread(fields[0], waits_in, int(fields[11]) + int(fields[12])))
    return threads


def children(parent: int) -> set[int]:
    return set(map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))


def loads_weights(pid: int) -> bool:
    """Of a process that does not serve yet. Ray writes into its title what it is, and what it does."""
    actor, _, method = _title(pid).partition(".")
    return actor == "ray::ExpertWorker" and method != "__init__"


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()
    except OSError:
        return ""


def listening_of(pid: int, ports: range) -> list[Address]:
    """Addresses with one of these ports, in order."""
    connections = psutil.Process(pid).net_connections("tcp")
    listening = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
    return sorted((laddr.ip, laddr.port) for laddr in listening if laddr.port in ports)


def clients_of(pid: int, port: int) -> set[Address]:
    """The other ends of the connections that the process has accepted on this port of its own."""
    connections = psutil.Process(pid).net_connections("tcp")
    accepted = [c.raddr for c in connections if c.raddr and c.laddr.port == port]
    return {(raddr.ip, raddr.port) for raddr in accepted}


@contextmanager
def taking(address: Address) -> Iterator[None]:
    """From the moment on that its owner is gone."""

    def take() -> socket.socket | None:
        with suppress(OSError):
            return socket.create_server(address)
        return None

    with eventually(take, 5.0, f"{address} to be free", pause_seconds=0.002):
        yield
