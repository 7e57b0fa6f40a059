"""`pointsman serve` on the head of a Ray cluster over hosts, and its ranks wherever they are."""

import json
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.hosts.desk import pointsman_command
from tests.helpers.hosts.host import Host
from tests.helpers.served import ServeProcess

ADMIN_URL = "http://127.0.0.1:8001/admin"


class ServedOnHosts(ServeProcess):
    """The API is reached from this machine."""

    def __init__(self, hosts: Sequence[Host], directory: Path, *arguments: str) -> None:
        """The first host is the head."""
        self._hosts = {host.address: host for host in hosts}
        self.head = hosts[0]
        command = pointsman_command(
            self.head, *("serve", "--address", "auto", "--host", self.head.address), *arguments
        )
        super().__init__(command, directory)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.head.signal("pointsman serve", signal.SIGKILL)
        self.process.wait(30.0)

    def stop(self, seconds: float) -> int:
        """As a service manager does; its exit code."""
        assert self.head.signal("pointsman serve", signal.SIGTERM) > 0
        return self.process.wait(seconds)

    # --- what it says

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
        return {
            rank: (self._hosts[process.host], process.pid)
            for rank, process in self.rank_processes.items()
        }

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        host, pid = self.places[rank]
        host.run(f"kill -{int(number)} {pid}")
