"""One host: namespaces of its own for network, mounts, processes and names, and an sshd as its first process."""

import ctypes
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.helpers.hosts.links import Port

BOOT = Path(__file__).parent / "boot.sh"
BOOT_SECONDS = 20.0
END_SECONDS = 20.0


class Host:
    """Owner of its processes; its link belongs to the network, its directory to the fleet.

    It has /tmp, /dev/shm, /run and root's home for itself; the rest of the file system is this machine's.
    """

    def __init__(self, port: Port, directory: Path, shared: Sequence[Path]) -> None:
        self._port = port
        self._directory = directory
        self._shared = shared
        self._root: subprocess.Popen[bytes] | None = None
        self._processes = ""
        """The link that names its process namespace, also after its end."""
        self._said = 0
        """Bytes of the log that tell of earlier boots."""
        self.home.mkdir(parents=True)
        (directory / "passwd").write_text(_passwd(self.home))

    @property
    def name(self) -> str:
        return self._port.name

    @property
    def address(self) -> str:
        return self._port.address

    @property
    def network(self) -> str:
        """Every link and namespace of its network has a name that begins so."""
        return self._port.namespace.rpartition("-")[0]

    @property
    def home(self) -> Path:
        """Of its root; survives a kill."""
        return self._directory / "home"

    @property
    def log(self) -> Path:
        """What its sshd says."""
        return self._directory / "sshd.log"

    # --- life

    def boot(self) -> None:
        """Returns when it can be reached by ssh. Raises AssertionError after BOOT_SECONDS."""
        self.start()
        self.wait_until_up()

    def start(self) -> None:
        """It ends with the thread that calls this: on Linux that is the parent whose death ends a child."""
        assert self._root is None, f"{self.name} runs already"
        self.heal()
        with self.log.open("ab") as log:
            self._root = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self._port.namespace),
                    *("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc"),
                    *("--kill-child", "--propagation", "private", "--"),
                    *("bash", str(BOOT), str(self._directory), self.name),
                    *map(str, self._shared),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=_end_with_parent,
            )

    def wait_until_up(self) -> None:
        assert self._root is not None, f"{self.name} is off"
        deadline = time.monotonic() + BOOT_SECONDS
        while b"Server listening on" not in self.log.read_bytes()[self._said :]:
            assert self._root.poll() is None, f"{self.name} did not boot:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, (
                f"{self.name} does not listen:\n{self.log.read_text()}"
            )
            time.sleep(0.02)
        self._said = self.log.stat().st_size
        self._processes = os.readlink(f"/proc/{self._first()}/ns/pid")

    def kill(self) -> None:
        """As if its power failed: peers hear nothing more, no process of it is left. Idempotent."""
        if self._root is None:
            return
        self.cut()
        self._root.kill()
        self._root.wait(END_SECONDS)
        self._root = None
        deadline = time.monotonic() + END_SECONDS
        while left := self.processes():
            assert time.monotonic() < deadline, f"left on {self.name}: {left}"
            time.sleep(0.02)

    # --- its link

    def cut(self) -> None:
        """Nothing reaches it any more, and nobody is told."""
        self._port.down()

    def heal(self) -> None:
        self._port.up()

    # --- what runs on it

    def processes(self) -> list[psutil.Process]:
        """All of them, its sshd included."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def run(self, command: str, seconds: float = 30.0) -> str:
        """Standard output of a shell on the host itself, not over its link. Raises AssertionError, TimeoutExpired."""
        done = subprocess.run(
            self.entering(["bash", "-c", command]),
            capture_output=True,
            timeout=seconds,
            text=True,
        )
        if done.returncode:
            raise AssertionError(
                f"{command!r} on {self.name} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def entering(self, command: Sequence[str]) -> list[str]:
        """The command as this machine starts it on the host."""
        spaces = ("--mount", "--uts", "--net", "--pid")
        environment = (f"HOME={self.home}", f"PATH={os.environ['PATH']}", "LC_ALL=C.UTF-8")
        return [
            *("nsenter", "--target", str(self._first()), *spaces, "--"),
            *("env", "-i", *environment, *command),
        ]

    def signal(self, pattern: str, number: signal.Signals) -> int:
        """To every process of the host whose command line holds `pattern`; how many there were."""
        hit = [p for p in self.processes() if pattern in _command_line(p)]
        for process in hit:
            process.send_signal(number)
        return len(hit)

    def _first(self) -> int:
        assert self._root is not None, f"{self.name} is off"
        (first,) = psutil.Process(self._root.pid).children()
        return first.pid

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return os.readlink(f"/proc/{process.pid}/ns/pid") == self._processes
        except OSError:  # ended meanwhile
            return False


def _command_line(process: psutil.Process) -> str:
    try:
        return shlex.join(process.cmdline())
    except psutil.Error:
        return ""


def _passwd(home: Path) -> str:
    """This machine's users, root with another home."""
    lines = Path("/etc/passwd").read_text().splitlines()
    others = [line for line in lines if not line.startswith("root:")]
    return "\n".join([f"root:x:0:0:root:{home}:/bin/bash", *others]) + "\n"


def _end_with_parent() -> None:
    """In the child: SIGKILL when the test process is gone, however it went (Linux: PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
