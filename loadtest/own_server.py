"""A `pointsman serve` of one's own for the time of a load run, and what it says about itself."""

import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadtest.answer import TokenCounts

START_SECONDS = 330.0
"""Longer than `cell.start_timeout_seconds`: a start that takes too long says what it waited for."""
STOP_SECONDS = 60.0
IDLE_SECONDS = 30.0
"""How long the last requests of a run may take to leave the engine."""
_POLL_SECONDS = 0.2
_READY = re.compile(r"pointsman is ready: (http://\S+) \(model \S+, admin (http://[^)]+)\)")
_COUNTER = re.compile(
    r'^pointsman_(?:prompt_tokens_total\{source="(\w+)"\}|(generation)_tokens_total) (\S+)$', re.M
)


class ServerFailed(Exception):
    """It did not start, did not come to rest, or ended with an error."""


class Status(msgspec.Struct, frozen=True):
    """Part of `GET /admin/status`."""

    num_waiting: int
    num_running: int
    kv_blocks_used: list[int]
    kv_blocks_leased: int

    @property
    def is_idle(self) -> bool:
        return self.num_waiting == self.num_running == self.kv_blocks_leased == 0


@dataclass(frozen=True)
class OwnServer:
    base_url: str
    admin_url: str

    def status(self) -> Status:
        return msgspec.json.decode(_get(f"{self.admin_url}/admin/status"), type=Status)

    def wait_until_idle(self) -> Status:
        """Raises ServerFailed when requests or leases are left."""
        deadline = time.monotonic() + IDLE_SECONDS
        while not (status := self.status()).is_idle:
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"not idle {IDLE_SECONDS:.0f} s after the last request: {status}"
                )
            time.sleep(_POLL_SECONDS)
        return status

    def evict_everything(self) -> None:
        request = urllib.request.Request(
            f"{self.admin_url}/admin/evict",
            data=b'{"part": "all"}',
            headers={"content-type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=IDLE_SECONDS).close()

    def tokens(self) -> TokenCounts:
        """Since it was started, as /metrics counts them."""
        return token_counts(_get(f"{self.base_url}/metrics").decode())


def token_counts(metrics: str) -> TokenCounts:
    """Of a page in the Prometheus text format."""
    totals = {
        source or generation: int(float(value))
        for source, generation, value in _COUNTER.findall(metrics)
    }
    return TokenCounts(
        totals["computed"], totals["cached"], totals["replayed"], totals["generation"]
    )


@contextmanager
def own_server(arguments: Sequence[str]) -> Iterator[OwnServer]:
    """On free ports. Its log goes to this process's stderr; it is interrupted at the end. Raises ServerFailed."""
    with tempfile.TemporaryDirectory(prefix="load-") as directory:
        stdout = Path(directory) / "stdout"
        with stdout.open("w") as out:
            process = subprocess.Popen(
                [
                    str(Path(sys.executable).parent / "pointsman"),
                    *("serve", "--port", "0", "--admin-port", "0"),
                    *arguments,
                ],
                stdout=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which then interrupts it
            )
        try:
            yield _ready(process, stdout)
        finally:
            code = _stop(process)
        if code != 0:
            raise ServerFailed(f"pointsman serve ended with {code}")


def _ready(process: "subprocess.Popen[bytes]", stdout: Path) -> OwnServer:
    deadline = time.monotonic() + START_SECONDS
    while (match := _READY.search(stdout.read_text())) is None:
        if process.poll() is not None:
            raise ServerFailed(
                f"pointsman serve ended with {process.returncode} before it was ready"
            )
        if time.monotonic() > deadline:
            raise ServerFailed(f"pointsman serve was not ready within {START_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)
    return OwnServer(match[1], match[2])


def _stop(process: "subprocess.Popen[bytes]") -> int:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise ServerFailed(f"pointsman serve did not stop within {STOP_SECONDS:.0f} s") from None


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=IDLE_SECONDS) as answer:
        body: bytes = answer.read()
        return body
