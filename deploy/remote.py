"""Commands on the hosts of a cluster: by ssh on machines of one's own, by `ray exec` where a cloud knows the way."""

import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import DeadlineError
from deploy.cluster_file import ClusterFile

SSH_FAILED = 255
CONNECT_SECONDS = 10
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
    """code: None when it did not end in time"""

    code: int | None
    output: str
    errors: str

    @property
    def reason(self) -> str:
        """One line on why it is not what was asked for."""
        lines = [line for line in (self.errors or self.output).splitlines() if line.strip()]
        return lines[-1].strip() if lines else "no answer in time"


def own_program(name: str) -> str:
    """Beside the Python that runs this."""
    return str(Path(sys.executable).parent / name)


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
    return [own_program("ray"), "exec", "--no-config-cache", str(file.path), _login(script)]


def run(
    command: Sequence[str], seconds: float, environment: dict[str, str] | None = None
) -> Answer:
    """Its end is waited for so long; then it is killed here, whatever it does over there."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired as error:
        return Answer(None, _text(error.stdout), "")
    return Answer(done.returncode, done.stdout, done.stderr)


def lines_of(command: Sequence[str], seconds: float) -> Iterator[str]:
    """What it says, as it says it, until it ends or the caller stops listening; it is ended then.

    Raises DeadlineError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    said: queue.Queue[str | None] = queue.Queue(maxsize=10_000)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
    ) as process:
        listening = threading.Thread(target=_listen, args=(process, said), daemon=True)
        listening.start()
        try:
            while (line := _next(said, deadline, seconds)) is not None:
                yield line
        finally:
            process.kill()
            while listening.is_alive():  # it may wait for room in the queue
                _drop(said)


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
    try:
        said.get(timeout=0.05)
    except queue.Empty:
        return


def _login(script: str) -> str:
    """As `ray up` runs its commands: with the PATH that the user has there."""
    return f"bash --login -c {shlex.quote(script)}"


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
