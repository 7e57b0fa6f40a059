"""One driver run to its end or its deadline, and what its lines say."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.environments import Environment

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "127.0.0.1,localhost",
}
FORWARDED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TERM")
"""Nothing else of this process's environment: keys, proxies and settings of the user's own are not for a check."""
SHOWN_LINES = 30


@dataclass(frozen=True)
class Target:
    """What drivers are given, in this order."""

    url: str
    model: str
    api_key: str
    tokenizer_dir: Path

    @property
    def arguments(self) -> tuple[str, ...]:
        return (self.url, self.model, self.api_key, str(self.tokenizer_dir.absolute()))


@dataclass(frozen=True)
class Told:
    """checked: names of checks; failed, left_out: names with the reason."""

    checked: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    output: str = ""
    """The end of what it wrote, to find out why."""


def drive(
    environment: Environment,
    target: Target,
    *,
    seconds: float,
    variables: Mapping[str, str] | None = None,
) -> Told:
    """Nothing that it has started is left."""
    inherited = {name: os.environ[name] for name in FORWARDED if name in os.environ}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*environment.command, *target.arguments],
            cwd=environment.directory,
            env={**inherited, **OFFLINE, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = _ended(process, seconds)
        output.seek(0)
        return _told(output.read().splitlines(), process.returncode, ended)


def _ended(process: "subprocess.Popen[bytes]", seconds: float) -> str | None:
    """Why it did not end by itself. Kills its whole group in any case."""
    began = time.monotonic()
    try:
        process.wait(seconds)
        return None
    except subprocess.TimeoutExpired:
        return f"not done within {time.monotonic() - began:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # nobody is left in it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _told(lines: Sequence[str], code: int, ended: str | None) -> Told:
    def after(prefix: str) -> tuple[str, ...]:
        return tuple(line.removeprefix(prefix) for line in lines if line.startswith(prefix))

    checked, failed, left_out = after("checked "), after("failed "), after("left out ")
    if ended is not None:
        failed += (ended,)
    elif code != 0 and not failed:
        failed += (f"its driver ended with {code}",)
    elif not checked:
        failed += ("its driver checked nothing",)
    return Told(checked, failed, left_out, "\n".join(lines[-SHOWN_LINES:]))
