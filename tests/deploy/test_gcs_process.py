"""The process of Ray's head is started again as it was, if it is here and keeps its state. Processes are a shell's."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from deploy.gcs_process import GcsProcess
from tests.helpers.served import eventually

ADDRESS = "10.0.0.1:6379"
FLAGS = ("--gcs_server_port=6379", "--node-ip-address=10.0.0.1")
REDIS = "--redis_address=10.0.0.9"


@contextmanager
def gcs_server(directory: Path, *flags: str, **environment: str) -> Iterator[psutil.Process]:
    """A shell under that name, which writes a line and stops."""
    shell = shutil.copy("/bin/bash", directory / "gcs_server")
    code = "echo $MARK >> $OUT; kill -STOP $$"
    out = directory / "out"
    settings = {"OUT": str(out), **environment}
    with subprocess.Popen(
        [shell, "-c", code, "name", *flags], env=settings, start_new_session=True
    ) as process:
        try:
            eventually(out.exists, 10.0, "its line")
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def _end(process: "psutil.Process | subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait(10.0)


def test_one_that_keeps_its_state_is_started_again_with_its_command_and_environment(
    tmp_path: Path,
) -> None:
    with gcs_server(tmp_path, *FLAGS, REDIS, MARK="mine") as process:
        found = GcsProcess.find(ADDRESS, [psutil.Process(), process])
        assert found is not None
        assert not found.start_again()
        _end(process)
        assert found.start_again()
        try:
            lines = tmp_path / "out"
            eventually(lambda: lines.read_text() == "mine\nmine\n", 10.0, "a second line")
            assert found.process.cmdline() == found.command
            assert not found.start_again()
        finally:
            assert found.started is not None
            _end(found.started)


def test_one_that_keeps_it_in_files_is_started_again_too(tmp_path: Path) -> None:
    with gcs_server(tmp_path, *FLAGS, RAY_gcs_storage="rocksdb") as process:
        assert GcsProcess.find(ADDRESS, [process]) is not None


def test_one_that_would_come_back_empty_is_left_alone(tmp_path: Path) -> None:
    with gcs_server(tmp_path, *FLAGS) as process:
        assert GcsProcess.find(ADDRESS, [process]) is None


def test_the_head_of_another_cluster_is_left_alone(tmp_path: Path) -> None:
    with gcs_server(tmp_path, *FLAGS, REDIS) as process:
        assert GcsProcess.find("10.0.0.1:6380", [process]) is None
        assert GcsProcess.find("10.0.0.2:6379", [process]) is None
