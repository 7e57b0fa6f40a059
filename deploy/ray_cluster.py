"""A local Ray of our own: started with one retry, ended with everything that it started, and nothing else."""

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray

from cluster.errors import CellError
from cluster.log import logger
from deploy.ray_authentication import set_own_token

OBJECT_STORE_BYTES = 100 * 2**20
"""Ray's object store is not on our path; this is about its minimum."""
END_SECONDS = 2.0
"""For processes that are left after Ray's own shutdown; then they are killed."""
_LONGEST_DIRECTORY = 40
"""Ray appends up to 66 characters for its Unix sockets, whose paths Linux limits to 107."""
_LOG = logger("ray")


class RayCluster:
    """Owner of the Ray processes and of their temporary directory, which is removed with them."""

    def __init__(
        self,
        num_cpus: int,
        num_gpus: int,
        *,
        start: Callable[..., object] = ray.init,
        end_seconds: float = END_SECONDS,
        environment: MutableMapping[str, str] = os.environ,
    ) -> None:
        """Raises CellError when Ray does not start the second time either. `start` is called as ray.init is."""
        set_own_token(environment)
        self._not_ours = _descendants()
        self._directory = _temporary_directory()
        self._end_seconds = end_seconds
        settings: dict[str, Any] = {
            "address": "local",
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "logging_level": logging.ERROR,
            "_temp_dir": str(self._directory),
        }
        try:
            self._directory.mkdir(mode=0o700)
            self._start(start, settings)
        except BaseException:  # an interrupt too must leave nothing
            self.close()
            raise

    def _start(self, start: Callable[..., object], settings: dict[str, Any]) -> None:
        """Once more after a failure: Ray gives its own processes 30 s, which a busy machine may exceed."""
        try:
            start(**settings)
            return
        except Exception as error:  # Ray raises a bare Exception when its 30 s for a node are over
            _LOG.warning("ray did not start, trying once more reason=%r", _first_line(error))
        self._end_processes()
        try:
            start(**settings)
        except Exception as error:
            raise CellError(f"Ray did not start: {_first_line(error)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._end_processes()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _end_processes(self) -> None:
        """Shuts Ray down, waits for every process that was started since, directly or not, and kills what stays.

        Actors are children of the raylet and lose that parent when it ends first, so they are listed before.
        """
        started = _descendants() - self._not_ours
        ray.shutdown()
        started |= _descendants() - self._not_ours
        _, left = psutil.wait_procs(started, timeout=self._end_seconds)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=END_SECONDS)


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _temporary_directory() -> Path:
    """A free name under TMPDIR, unless that is too long for a Unix socket. Named before it is made, so that whoever
    interrupts the making finds it."""
    parent = tempfile.gettempdir()
    if len(parent) > _LONGEST_DIRECTORY - len("/pointsman-12345678"):
        parent = "/tmp"
    return Path(parent) / f"pointsman-{secrets.token_hex(4)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
