"""Processes by their number: of one that is gone nothing is raised."""

import signal
import subprocess

import psutil

from deploy.processes import kill_process, named, runs


def test_one_that_is_there_has_a_name_and_is_killed_also_while_it_is_stopped() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        process = psutil.Process(child.pid)
        assert (named(process), runs(process)) == ("sleep", True)
        process.suspend()
        kill_process(child.pid)
        assert child.wait(10) == -signal.SIGKILL
    assert not runs(process)


def test_one_that_has_ended_while_it_was_looked_at_has_no_name() -> None:
    with subprocess.Popen(["true"]) as child:
        process = psutil.Process(child.pid)
    assert (named(process), runs(process)) == (None, False)
