"""`pointsman serve` on the head of a Ray cluster over hosts, and its ranks wherever they are."""

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.helpers.hosts.desk import pointsman_command
from tests.helpers.hosts.host import Host
from tests.helpers.served import eventually

READY_SECONDS = 240.0
ADMIN_URL = "http://127.0.0.1:8001/admin"
_RANK = re.compile(r"rank ready rank=(\d+) pid=(\d+) host=(\S+)", re.ASCII)


class ServedOnHosts:
    """Owner of one `pointsman serve` process and its two output files. The API is reached from this machine."""

    def __init__(self, hosts: Sequence[Host], directory: Path, *arguments: str) -> None:
        """The first host is the head."""
        self._hosts = {host.address: host for host in hosts}
        self.head = hosts[0]
        self.base_url = f"http://{self.head.address}:8000"
        self._out, self._err = directory / "stdout", directory / "stderr"
        command = pointsman_command(
            self.head, *("serve", "--address", "auto", "--host", self.head.address), *arguments
        )
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, stdin=subprocess.DEVNULL
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            print(f"--- stdout\n{self._out.read_text()}\n--- stderr\n{self.stderr}")
        if self.process.poll() is None:
            self.head.signal("pointsman serve", signal.SIGKILL)
        self.process.wait(30.0)

    def wait_until_ready(self) -> None:
        eventually(
            lambda: "pointsman is ready: " in self._out.read_text() or self._ended(),
            READY_SECONDS,
            "the ready line",
        )
        assert not self._ended(), f"ended with {self.process.returncode}:\n{self.stderr}"

    def _ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self, seconds: float) -> int:
        """As a service manager does; its exit code."""
        assert self.head.signal("pointsman serve", signal.SIGTERM) > 0
        return self.process.wait(seconds)

    # --- what it says

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def is_healthy(self) -> bool:
        return httpx.get(f"{self.base_url}/health", timeout=30.0).status_code == 200

    def status(self) -> Any:
        return json.loads(self.head.run(f"curl -sS --max-time 60 {ADMIN_URL}/status", 90.0))

    def evict_all(self) -> None:
        data = shlex.quote(json.dumps({"part": "all"}))
        self.head.run(
            f"curl -sSf --max-time 60 -H 'content-type: application/json' -d {data} {ADMIN_URL}/evict",
            90.0,
        )

    # --- its ranks

    @property
    def places(self) -> dict[int, tuple[Host, int]]:
        """By rank: its host, and its process as that host counts."""
        told = _RANK.findall(self.stderr)
        return {int(rank): (self._hosts[address], int(pid)) for rank, pid, address in told}

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        host, pid = self.places[rank]
        host.run(f"kill -{int(number)} {pid}")
