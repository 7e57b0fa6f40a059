"""Processes of this host, by their number."""

import contextlib
import os
import signal

import psutil


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def named(process: psutil.Process) -> str | None:
    """What it is called; None when it is gone."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return None


def kill_process(pid: int) -> None:
    """SIGKILL, which a stopped one obeys too. Nothing when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
