"""Ray's head: whether it answers, and how actors end while it does not. It places and starts processes and is not asked
for anything else: a cell serves without it, but nothing that is lost meanwhile is replaced before it is back."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import ray
import ray.exceptions
from ray._private.worker import global_worker  # the public calls to the head have no deadline

from cluster.config import ClusterSection
from cluster.log import logger
from deploy.gcs_process import GcsProcess
from deploy.processes import named, runs

ASK_SECONDS = 0.5
"""An answer takes a millisecond. Ray itself takes up to a second to give up."""
LOOK_SECONDS = 1.0
SILENCE_SECONDS = 1.5
"""Between two questions while it does not answer: whoever asks waits for each."""
TELL_SECONDS = 3.0
"""Shorter absences are not worth a line."""
DEAF_SECONDS = 10.0
"""After so long lines of other processes are not listened for any more; they stay in Ray's logs."""
RESTART_SECONDS = 5.0
"""Between two tries to start it again."""
EXIT_SECONDS = 1.0

_NO_NODE = (
    "the process raylet of this server's own Ray has ended, and with it everything that Ray had started: start the "
    "server again"
)
_LOG = logger("ray")


class RayHead:
    """Owner of what this process knows about the head. Calls that need it would wait without a deadline: who wants to
    start or end a process asks `answers` right before."""

    def __init__(
        self,
        cluster: ClusterSection,
        *,
        ask: Callable[[float], bool] | None = None,
        start_again: Callable[[], bool] | None = None,
        on_away: Callable[[], None] | None = None,
        has_node: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ask: whether the head answers within so many seconds. start_again: its process, where that is possible and it
        has ended. has_node: whether Ray still runs on this host"""
        self._is_own = not cluster.address
        self._limit_seconds = cluster.head_timeout_seconds
        self._ask = ask or _ask
        self._start_again = start_again
        self._on_away = on_away or _stop_listening
        self._has_node = has_node
        self._clock = clock
        self._silent_since: float | None = None
        self._next_question = self._next_look = self._next_start = 0.0
        self._is_told = self._is_deaf = False

    @property
    def is_away(self) -> bool:
        """As far as was told."""
        return self._is_told

    def answers(self) -> bool:
        """Now. Waits ASK_SECONDS, or somewhat longer, for an answer."""
        asked = self._clock()
        if asked < self._next_question:
            return False
        if self._ask(ASK_SECONDS):
            self._answered(asked)
            return True
        if self._silent_since is None:
            self._silent_since = asked
        self._next_question = self._clock() + SILENCE_SECONDS
        return False

    def look(self) -> str | None:
        """Asks now and then, and tells when the head is away or back. Returns why the cell has to end: it has been away
        for too long."""
        now = self._clock()
        if now < self._next_look:
            return None
        self._next_look = now + LOOK_SECONDS
        if not self._has_node():
            return _NO_NODE
        self.answers()
        if self._silent_since is None:
            return None
        silent_seconds = now - self._silent_since
        if silent_seconds >= TELL_SECONDS and not self._is_told:
            self._is_told = True
            _LOG.error("ray head away silent_seconds=%.0f", silent_seconds)
            _say(away_line(self._limit_seconds))
        if silent_seconds >= DEAF_SECONDS and not self._is_deaf:
            self._is_deaf = True
            _say("lines of the cell's other processes are in Ray's logs from now on")
            self._on_away()
        self._try_to_start(now)
        return (
            lost_line(silent_seconds, self._is_own)
            if silent_seconds >= self._limit_seconds
            else None
        )

    def _try_to_start(self, now: float) -> None:
        if self._is_told and self._start_again is not None and now >= self._next_start:
            self._next_start = now + RESTART_SECONDS
            if self._start_again():
                _say("Ray's head had ended on this host and is started again")

    def _answered(self, now: float) -> None:
        if self._is_told and self._silent_since is not None:
            _LOG.info("ray head back after_seconds=%.0f", now - self._silent_since)
            _say("Ray's head answers again: what was lost meanwhile is replaced")
        self._silent_since, self._is_told, self._next_question = None, False, 0.0


def joined_head(cluster: ClusterSection) -> RayHead:
    """Of the Ray that this process has joined, or has started."""
    if not cluster.address:
        return RayHead(cluster, has_node=_own_node())
    address = ray.get_runtime_context().gcs_address
    gcs = GcsProcess.find(address, psutil.process_iter())
    return RayHead(cluster, start_again=gcs.start_again if gcs is not None else None)


def _own_node() -> Callable[[], bool]:
    """Nothing can be started where its raylet has ended; actors end themselves within seconds."""
    raylets = [child for child in psutil.Process().children() if named(child) == "raylet"]
    return lambda: all(runs(raylet) for raylet in raylets)


def away_line(limit_seconds: float) -> str:
    return (
        "Ray's head does not answer: requests go on, but no process that is lost is replaced before it "
        f"is back; the cell ends if it is not within {limit_seconds:g} s"
    )


def lost_line(silent_seconds: float, is_own: bool) -> str:
    """What has happened, and what to do."""
    what = f"Ray's head has not answered for {silent_seconds:.0f} s (cluster.head_timeout_seconds)"
    if is_own:
        return f"{what}: the process gcs_server of this server's own Ray ended or hangs; start the server again"
    return (
        f"{what}: start Ray again, then the cell; a cell goes on if the head comes back in time and keeps its "
        "state outside (docs/deploy.md, Ray's head)"
    )


def end_actors(actors: Sequence[Any], head: RayHead) -> None:
    """Ray's way is by the head; while that is away they are told themselves, and Ray hears of it later."""
    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor)
    if not actors or head.answers():
        return
    calls = [tell_to_exit(actor) for actor in actors]
    ray.wait(calls, num_returns=len(calls), timeout=EXIT_SECONDS)


def tell_to_exit(actor: Any) -> Any:
    """The call ends with the process."""
    return actor.__ray_call__.remote(_exit)


def _ask(seconds: float) -> bool:
    try:
        client = global_worker.gcs_client  # type: ignore[attr-defined]  # set when Ray is joined
        client.check_alive([], timeout=seconds)
    except ray.exceptions.RayError:
        return False
    return True


def _stop_listening() -> None:
    """Two threads of Ray, which bring lines of other processes here by way of the head, ask it without a pause while it
    is away (Ray 2.60): they take a core and this process's interpreter. They end, and the lines stay in Ray's logs."""
    global_worker.threads_stopped.set()


def _exit(_actor: object) -> None:
    os._exit(0)


def _say(line: str) -> None:
    print(f"pointsman: warning: {line}", file=sys.stderr, flush=True)
