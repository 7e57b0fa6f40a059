"""`pointsman serve` as a real process with everything that it starts, recognised by a mark in their environment.

Nothing here looks at processes, ports or files that another Ray or pointsman on this machine may own.
"""

import contextlib
import ctypes
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import psutil

READY_SECONDS = 90.0
GONE_SECONDS = 10.0
"""After a stop or a failure has ended `serve`, or after a signal: so long until nothing may be left."""
_MARK = "POINTSMAN_TEST_FLEET"
_READY = re.compile(
    r"pointsman is ready: (https?://\S+) \(model (\S+), admin (https?://[^)]+)\)", re.ASCII
)
_RANK = re.compile(r"rank ready rank=(\d+) pid=(\d+) host=(\S+)", re.ASCII)
T = TypeVar("T")


def eventually(
    probe: Callable[[], T | None], seconds: float, what: str, *, pause_seconds: float = 0.05
) -> T:
    """The first result that is neither None nor False. Raises AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        result = probe()
        if result is not None and result is not False:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:.0f} s")
        time.sleep(pause_seconds)


class RankProcess(NamedTuple):
    """pid: as its host counts; host: by its address."""

    pid: int
    host: str


class ServeProcess(ABC):
    """Owner of one `pointsman serve`, on whatever host, and of its two output files in `outputs`."""

    def __init__(self, command: Sequence[str], outputs: Path, **options: Any) -> None:
        """options: of Popen."""
        self._out, self._err = outputs / "stdout", outputs / "stderr"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, **options
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leaves nothing behind, also after a failed test, whose output it then shows."""
        if kind is not None:
            print(f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}", file=sys.stderr)
        self.kill()

    @abstractmethod
    def kill(self) -> None:
        """All that it started, at once."""

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def stderr_from(self, offset: int) -> str:
        """What has come after so many bytes."""
        with self._err.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")

    @property
    def stderr_bytes(self) -> int:
        return self._err.stat().st_size

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> Self:
        eventually(
            lambda: _READY.search(self.stdout) is not None or self._ended(),
            seconds,
            "the ready line",
        )
        self._ready()
        return self

    def _ready(self) -> re.Match[str]:
        match = _READY.search(self.stdout)
        assert match is not None, f"ended with {self.process.returncode}:\n{self.stderr}"
        return match

    def _ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def base_url(self) -> str:
        return self._ready()[1]

    @property
    def rank_processes(self) -> dict[int, RankProcess]:
        """By rank: the newest."""
        told = _RANK.findall(self.stderr)
        return {int(rank): RankProcess(int(pid), host) for rank, pid, host in told}


class Served(ServeProcess):
    """On this machine; owner of its temporary directory, too.

    The process leads a session of its own, so a signal to its group is what Ctrl-C in a terminal sends.
    """

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._mark = uuid.uuid4().hex
        self.directory = Path(tempfile.mkdtemp(prefix="cell-"))  # short: it holds Unix sockets
        self._outputs = Path(tempfile.mkdtemp(prefix="cell-output-"))
        self._seen: set[psutil.Process] = set()
        self._shared_memory: set[Path] = set()
        program = Path(sys.executable).parent / "pointsman"
        super().__init__(
            [str(program), "serve", "--port", "0", "--admin-port", "0", *arguments],
            self._outputs,
            start_new_session=True,
            preexec_fn=_end_with_parent,
            env={**os.environ, "TMPDIR": str(self.directory), _MARK: self._mark}
            | (environment or {}),
        )

    def kill(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its parent
                process.kill()
        self.process.wait(timeout=GONE_SECONDS)
        for directory in (self.directory, self._outputs):
            shutil.rmtree(directory, ignore_errors=True)

    # --- what it says

    @property
    def failure_lines(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("pointsman: ")]

    def wait_for_stderr(self, text: str, seconds: float) -> None:
        eventually(lambda: text in self.stderr or self._ended(), seconds, f"{text!r} on stderr")
        assert text in self.stderr, f"ended before {text!r}:\n{self.stderr}"

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> Self:
        super().wait_until_ready(seconds)
        self.note()
        assert list(self.directory.iterdir()), "its temporary files are elsewhere"
        return self

    @property
    def model(self) -> str:
        return self._ready()[2]

    @property
    def admin_url(self) -> str:
        return self._ready()[3]

    # --- its processes

    def processes(self) -> list[psutil.Process]:
        """All that run now, orphans included; zombies are not processes any more.

        Some processes of Ray write their title over their environment; those are found as children or remembered.
        """
        found = {process for process in psutil.process_iter() if self._marked(process)}
        for process in list(found):
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= set(process.children(recursive=True))
        self._seen |= found
        return [process for process in self._seen if _runs(process)]

    def _marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == self._mark
        except psutil.Error:  # ended meanwhile, or of another user
            return False

    def pid_of(self, actor: str) -> int:
        """Of the actor class of which there is one."""
        (pid,) = self.pids_of(actor)
        return pid

    def pids_of(self, actor: str) -> list[int]:
        """Of all actors of a class that run."""
        name = f"ray::{actor}"
        return [p.pid for p in self.processes() if _title(p).partition(".")[0] == name]

    def pid_of_rank(self, rank: int) -> int:
        return self.rank_processes[rank].pid

    def note(self) -> None:
        """Remembers what exists now, for `assert_nothing_left`."""
        for process in self.processes():
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except (psutil.Error, OSError):
                continue
            self._shared_memory |= {Path(f) for f in re.findall(r"/dev/shm/\S+", maps)}

    # --- its end

    def interrupt(self) -> None:
        """Ctrl-C: the terminal signals the whole foreground group."""
        self.note()
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """What a service manager sends, to the parent only."""
        self.note()
        self.process.terminate()

    def wait(self, seconds: float) -> int:
        """The exit code."""
        return self.process.wait(timeout=seconds)

    def assert_nothing_left(self, seconds: float = GONE_SECONDS) -> None:
        eventually(lambda: not self.processes(), seconds, f"the end of {self.processes()}")
        assert list(self.directory.iterdir()) == []
        assert [file for file in self._shared_memory if file.exists()] == []
        if (match := _READY.search(self.stdout)) is not None:
            assert [url for url in (match[1], match[3]) if _listens(url)] == []


def wait_for_worker_process(served: Served) -> None:
    """An actor process of a rank exists; it has not loaded anything yet."""
    eventually(
        lambda: any("ExpertWorker" in p.name() for p in served.processes()), 60.0, "a worker"
    )


def _title(process: psutil.Process) -> str:
    """What it calls itself; empty when it has just ended."""
    try:
        return "".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _listens(url: str) -> bool:
    try:
        with socket.create_server(address_of(url)):
            return False
    except OSError:
        return True


def free_port() -> int:
    """Free a moment ago, and below those (from 32768) that the system gives to whoever asks for any: Ray takes dozens
    before an HTTP server comes."""
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("a hundred ports are taken")


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def _end_with_parent() -> None:
    """In the child: SIGTERM when the test process is gone, however it went (Linux: PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
