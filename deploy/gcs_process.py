"""The process of Ray's head (gcs_server) on this host, which nobody starts again when it ends: `ray start` refuses to,
because the rest of Ray runs."""

import contextlib
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import psutil

from cluster.log import logger
from deploy.processes import runs

_NAME = "gcs_server"
_STORAGE = "RAY_gcs_storage"
_LOG = logger("ray")


@dataclass
class GcsProcess:
    """One that keeps its state where it outlives it: in Redis, or in files. It is started as Ray had started it."""

    command: list[str]
    environment: dict[str, str]
    process: psutil.Process
    started: subprocess.Popen[bytes] | None = None
    """By `start_again`, the last one."""

    @classmethod
    def find(cls, address: str, processes: Iterable[psutil.Process]) -> Self | None:
        """address: HOST:PORT of the head. None where it is not on this host, is not ours, or would come back empty."""
        host, _, port = address.rpartition(":")
        flags = {f"--gcs_server_port={port}", f"--node-ip-address={host}"}
        for process in processes:
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if command and command[0].endswith(_NAME) and flags <= set(command):
                    found = cls(command, process.environ(), process)
                    return found if found._keeps_state() else None
        return None

    def start_again(self) -> bool:
        """Whether it had ended, and was started. It belongs to Ray again and goes on when this process ends."""
        if runs(self.process):
            return False
        with contextlib.suppress(OSError):
            self.started = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self.process = psutil.Process(self.started.pid)
            _LOG.warning("ray head started again pid=%d", self.started.pid)
            return True
        return False

    def _keeps_state(self) -> bool:
        in_redis = any(word.startswith("--redis_address=") for word in self.command)
        return in_redis or self.environment.get(_STORAGE) == "rocksdb"
