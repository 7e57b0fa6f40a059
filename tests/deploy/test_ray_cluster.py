"""Starting and ending a Ray of our own, with starters that fail: no Ray is needed."""

import os
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest

from cluster.errors import CellError
from deploy.ray_cluster import RayCluster


class Starter:
    """Stands for ray.init: starts a process, then fails as often as asked."""

    def __init__(self, failures: list[BaseException]) -> None:
        self._failures = failures
        self.started: list[psutil.Process] = []
        self.directories: list[Path] = []

    def __call__(self, **settings: object) -> None:
        self.directories.append(Path(str(settings["_temp_dir"])))
        pid = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)
        self.started.append(psutil.Process(pid))
        if self._failures:
            raise self._failures.pop(0)

    def runs(self) -> list[bool]:
        return [process.is_running() for process in self.started]


def cluster(starter: Starter) -> RayCluster:
    return RayCluster(1, 0, start=starter, end_seconds=0.1, environment={})


def timed_out() -> Exception:
    return Exception("The current node timed out during startup.\nSee the logs.")


def test_a_start_that_fails_once_is_tried_again_without_what_the_first_left_running() -> None:
    starter = Starter([timed_out()])
    with cluster(starter):
        assert starter.runs() == [False, True]
        assert starter.directories[1].is_dir()
    assert starter.runs() == [False, False]
    assert not starter.directories[1].exists()


def test_a_start_that_fails_twice_is_one_line_and_leaves_nothing() -> None:
    starter = Starter([timed_out(), timed_out()])
    with pytest.raises(CellError, match=r"^Ray did not start: The current node timed out[^\n]*$"):
        cluster(starter)
    assert starter.runs() == [False, False]
    assert not any(directory.exists() for directory in starter.directories)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), SystemExit(15)])
def test_an_interrupted_start_is_not_tried_again_and_leaves_nothing(
    interruption: BaseException,
) -> None:
    starter = Starter([interruption])
    with pytest.raises(type(interruption)):
        cluster(starter)
    assert starter.runs() == [False]
    assert not starter.directories[0].exists()


def test_processes_that_were_there_before_are_left_alone() -> None:
    with subprocess.Popen(["sleep", "600"]) as before:
        with cluster(Starter([])):
            pass
        assert before.poll() is None
        before.kill()


def test_the_temporary_directory_is_short_enough_for_unix_sockets() -> None:
    starter = Starter([])
    with cluster(starter):
        assert len(str(starter.directories[0])) <= 40
        assert starter.directories[0].parent in (Path(tempfile.gettempdir()), Path("/tmp"))
