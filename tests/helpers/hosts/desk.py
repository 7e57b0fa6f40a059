"""The machine of an operator beside the hosts of a cluster: it runs `pointsman` and reads what that says."""

import json
import os
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.hosts.cluster_files import PROGRAMS
from tests.helpers.hosts.fleet import REPOSITORY
from tests.helpers.hosts.host import Host

UP_SECONDS = 900.0
SSH_PORT = 22


@dataclass(frozen=True)
class Said:
    """What one run of `pointsman` has come to."""

    code: int
    output: str
    errors: str
    seconds: float

    @property
    def failures(self) -> list[str]:
        return [line for line in self.errors.splitlines() if line.startswith("pointsman: ")]

    def __str__(self) -> str:
        return f"code {self.code} after {self.seconds:.0f} s\n{self.output}\n{self.errors[-8000:]}"


def pointsman(host: Host, *arguments: str, seconds: float = UP_SECONDS) -> Said:
    """Runs to its end."""
    started = time.monotonic()
    done = subprocess.run(
        pointsman_command(host, *arguments), capture_output=True, text=True, timeout=seconds
    )
    return Said(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


def pointsman_command(host: Host, *arguments: str) -> list[str]:
    """As this machine starts it there."""
    code = f"PYTHONPATH={REPOSITORY} exec {PROGRAMS}/pointsman {shlex.join(arguments)}"
    return host.entering(["bash", "-c", code])


def get(host: Host, url: str) -> Any:
    """The JSON that a URL answers, asked from that host."""
    return json.loads(host.run(f"curl -sS --max-time 60 {shlex.quote(url)}", 90.0))


def complete(host: Host, base_url: str, **body: Any) -> Any:
    """An answer of the completions endpoint, asked from that host."""
    data = shlex.quote(json.dumps({"model": "minnow", "temperature": 0.0, **body}))
    command = f"curl -sS --max-time 120 -H 'content-type: application/json' -d {data} {base_url}/v1/completions"
    return json.loads(host.run(command, 150.0))


def left_on(host: Host) -> list[str]:
    """Processes beside its sshd, ports that somebody listens on beside sshd's, and shared memory."""
    processes = [p.name() for p in host.processes() if p.name() != "sshd"]
    listening = [
        f"port {port}"
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for port in _listening(host.run(f"cat {table}"))
        if port != SSH_PORT
    ]
    return processes + listening + host.run("ls -A /dev/shm").split()


def _listening(table: str) -> set[int]:
    rows = [line.split() for line in table.splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def record(what: str, lines: list[str]) -> None:
    """Adds to the file that SYSTEM_TIMES names, if any: numbers for the docs."""
    if (file := os.environ.get("SYSTEM_TIMES")) is not None:
        with Path(file).open("a") as out:
            out.write("".join(f"{what}: {line}\n" for line in lines))
