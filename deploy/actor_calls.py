"""What became of calls to Ray actors: their results, or in one line why there is none."""

import re
import time
from dataclasses import dataclass
from typing import Any, Literal

import ray
import ray.exceptions

from cluster.errors import CellError, DeadlineError, PointsmanError

_PROCESS_DIED = "its process died; if nobody killed it, look for the kernel's out-of-memory killer"
_RAY_KILLED = (
    "Ray killed its process because the host's memory ran low (RAY_memory_usage_threshold)"
)
_MEMORY_USAGE = re.compile(r"\bwas (\S+ used / \S+ limit)")
_HOST_DIED = "its host does not answer any more"
_OUR_EXCEPTION = re.compile(
    r"^(cluster|router_service|prefix_store|expert_workers|deploy)\.[\w.]+: "
)


START_LIMIT = "cell.start_timeout_seconds"


def result_of(ref: Any, deadline: float, who: str, limit: str = START_LIMIT) -> Any:
    """A result of another process. Its failure becomes a CellError with one line. limit: what the deadline follows
    from"""
    try:
        return ray.get(ref, timeout=max(1.0, deadline - time.monotonic()))
    except ray.exceptions.RayError as error:
        raise failure_of(error, who, limit) from error


def failure_of(error: ray.exceptions.RayError, who: str, limit: str) -> CellError:
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return DeadlineError(f"{who} did not answer in time ({limit})")
    if isinstance(error, ray.exceptions.RayTaskError):
        return CellError(f"{who}: {one_line(error.cause)}")
    return CellError(f"{who}: {reason_of(error)}")


@dataclass(frozen=True)
class End:
    """How an endless call ended."""

    kind: Literal["returned", "raised", "died"]
    """died: its process is gone without a word."""
    reason: str
    """One line."""


def result_so_far(ref: Any) -> tuple[bool, Any]:
    """Whether a call has ended well, and what it gave; (False, None) while it goes on, (False, why) when it failed."""
    ended, _ = ray.wait([ref], timeout=0)
    if not ended:
        return False, None
    try:
        return True, ray.get(ref)
    except ray.exceptions.RayError:
        return False, end_of(ref).reason


def end_of(ref: Any) -> End:
    """Of a call that has ended."""
    try:
        result = ray.get(ref, timeout=1.0)
    except ray.exceptions.RayTaskError as error:
        return End("raised", one_line(error.cause))
    except ray.exceptions.RayError as error:
        return End("died", reason_of(error))
    return End("returned", str(result) if result else "it returned")


def reason_of(error: ray.exceptions.RayError) -> str:
    """Why an actor is not there, in one line: what its constructor raised, else that its process or its host died.

    Of an exception in a constructor Ray keeps the traceback's text alone, which ends with the exception.
    """
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        usage = _MEMORY_USAGE.search(str(error))
        return f"{_RAY_KILLED}: {usage[1]}" if usage is not None else _RAY_KILLED
    if not isinstance(error, ray.exceptions.RayActorError) or not error.actor_init_failed:
        return _HOST_DIED if "because its node has died" in str(error) else _PROCESS_DIED
    lines = str(error).splitlines()
    start = max((i for i, line in enumerate(lines) if line.startswith(" ")), default=-1) + 1
    if start >= len(lines):
        return _PROCESS_DIED
    return _OUR_EXCEPTION.sub("", lines[start]).strip()


def one_line(error: BaseException) -> str:
    """Our own messages are made to be read; others are not understood without their type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, PointsmanError) and lines:
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
