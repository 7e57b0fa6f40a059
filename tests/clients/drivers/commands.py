"""Clients that are commands: started as a user starts them, from the environment whose interpreter runs the driver."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from checking import CheckFailed

COMMAND_SECONDS = 600.0
"""Half a minute on an idle machine."""
SHOWN_LINES = 15


def run_command(
    name: str,
    arguments: Sequence[str],
    directory: Path,
    *,
    runs_in: Path | None = None,
    variables: Mapping[str, str] | None = None,
    seconds: float = COMMAND_SECONDS,
) -> str:
    """What it wrote, both streams. directory: where its caches go, and where it runs unless told otherwise.

    Raises CheckFailed with the end of it when it ends with an error or not at all.
    """
    home = {"HOME": str(directory), "HF_HOME": str(directory / "hf"), "COLUMNS": "120"}
    try:
        done = subprocess.run(
            [str(Path(sys.executable).parent / name), *arguments],
            cwd=runs_in or directory,
            env={**os.environ, **home, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"{name} was not done within {seconds:g} s") from error
    if done.returncode != 0:
        last = " / ".join(done.stdout.strip().splitlines()[-SHOWN_LINES:])
        raise CheckFailed(f"{name} ended with {done.returncode}: {last}")
    return done.stdout
