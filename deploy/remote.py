"""Commands on the hosts of a cluster: by ssh on machines of one's own, by `ray exec` where a cloud knows the way."""

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import DeadlineError
from deploy.cluster_file import ClusterFile
from deploy.ray_environment import LAUNCHER_ENVIRONMENT

SSH_FAILED = 255
_REPEATED = "Error: Command failed:\n"
"""`ray exec` repeats the whole command after it."""
CONNECT_SECONDS = 10
MAX_AT_ONCE = 32
_SSH_OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_SECONDS}",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "StrictHostKeyChecking=no",  # as `ray up` does: hosts are made anew under old addresses
    "UserKnownHostsFile=/dev/null",
    "LogLevel=ERROR",
)


@dataclass(frozen=True)
class Answer:
    """code: None when it did not end in time. `ray exec` makes one number of all failures and shows the script itself
    in the output, so that what scripts have to tell stands at the beginning of a line"""

    code: int | None
    output: str
    errors: str

    @property
    def reason(self) -> str:
        """One line on why it is not what was asked for."""
        for text in (self.errors.partition(_REPEATED)[0], self.output):
            lines = [line for line in text.splitlines() if line.strip()]
            if lines:
                return lines[-1].strip()
        return "no answer in time" if self.code is None else f"it ended with code {self.code}"


def own_program(name: str) -> str:
    """Beside the Python that runs this."""
    return str(Path(sys.executable).parent / name)


def ray_launcher(*arguments: str) -> list[str]:
    """A command of Ray's cluster launcher on this machine."""
    return for_launcher([own_program("ray"), *arguments])


def for_launcher(command: Sequence[str]) -> list[str]:
    """With what Ray's launcher reads from the environment only."""
    return ["env", *(f"{name}={value}" for name, value in LAUNCHER_ENVIRONMENT.items()), *command]


def on_host(file: ClusterFile, host: str, script: str) -> list[str]:
    """The command that runs a bash script on a host of one's own."""
    options = [*_SSH_OPTIONS]
    if file.ssh_proxy_command:
        options.append(f"ProxyCommand={file.ssh_proxy_command}")
    key = ["-i", str(Path(file.ssh_key).expanduser())] if file.ssh_key else []
    target = f"{file.ssh_user}@{host}" if file.ssh_user else host
    return [
        *("ssh", "-n", *key, *(part for option in options for part in ("-o", option))),
        *(target, _login(script)),
    ]


def on_head(file: ClusterFile, script: str) -> list[str]:
    if file.is_local:
        return on_host(file, file.hosts[0], script)
    return ray_launcher("exec", "--no-config-cache", str(file.path), _login(script))


def on_hosts(file: ClusterFile, script: str, seconds: float) -> dict[str, Answer]:
    """What each of one's own hosts answers; all are asked at once."""
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        answers = pool.map(lambda host: run(on_host(file, host, script), seconds), file.hosts)
        return dict(zip(file.hosts, answers, strict=True))


def run(command: Sequence[str], seconds: float) -> Answer:
    """Its end is waited for so long; then it is killed here, whatever it does over there."""
    with _started(command, subprocess.PIPE) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            return Answer(None, process.communicate()[0], "")
        except BaseException:  # an interrupt
            _kill(process)
            raise
    return Answer(process.returncode, output, errors)


def lines_of(command: Sequence[str], seconds: float) -> Iterator[str]:
    """What it says, as it says it, until it ends or the caller stops listening; it is ended then.

    Raises DeadlineError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    said: queue.Queue[str | None] = queue.Queue(maxsize=10_000)
    with _started(command, subprocess.DEVNULL) as process:
        listening = threading.Thread(target=_listen, args=(process, said), daemon=True)
        listening.start()
        try:
            while (line := _next(said, deadline, seconds)) is not None:
                yield line
        finally:
            _kill(process)
            while listening.is_alive():  # it may wait for room in the queue
                _drop(said)


def _started(command: Sequence[str], errors: int) -> "subprocess.Popen[str]":
    """In a session of its own: `ray exec` starts an ssh, which would outlive it and keep the pipe open."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _kill(process: "subprocess.Popen[str]") -> None:
    """With all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _listen(process: "subprocess.Popen[str]", said: "queue.Queue[str | None]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        said.put(line.rstrip("\r\n"))
    said.put(None)


def _next(said: "queue.Queue[str | None]", deadline: float, seconds: float) -> str | None:
    try:
        return said.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise DeadlineError(f"not within {seconds:g} s") from None


def _drop(said: "queue.Queue[str | None]") -> None:
    with contextlib.suppress(queue.Empty):
        said.get(timeout=0.05)


def _login(script: str) -> str:
    """As `ray up` runs its commands: with the PATH that the user has there."""
    return f"bash --login -c {shlex.quote(script)}"
