"""`pointsman down`: what serves drains, then Ray ends on every host, and that nothing is left is looked at on each."""

import contextlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import CellError
from deploy import remote
from deploy.cloud_instances import Instances, listed_instances
from deploy.cluster_file import ClusterFile
from deploy.remote_scripts import LEFT_RUNNING, NOT_DRAINED, stop_host, stop_serving

HOST_SECONDS = 120.0
RAY_DOWN_SECONDS = 900.0


@dataclass(frozen=True)
class Stopped:
    """What became of one host. problem: None when nothing runs there any more"""

    host: str
    problem: str | None


def down(file: ClusterFile, drain_seconds: float) -> int:
    """Raises CellError with every host that was not reached or still runs something. Idempotent."""
    _stop_serving(file, drain_seconds)
    if file.is_local:
        _stop_own_machines(file)
    else:
        _end_instances(file)
    return 0


def stopped_of(host: str, answer: remote.Answer) -> Stopped:
    if answer.code == 0:
        return Stopped(host, None)
    if answer.code == remote.SSH_FAILED:
        return Stopped(host, f"not reached: {answer.reason}")
    if answer.code == LEFT_RUNNING:
        left = "; ".join(line.strip()[:100] for line in answer.output.splitlines()[:5])
        return Stopped(host, f"still runs {left}")
    return Stopped(host, f"not stopped: {answer.reason}")


def check_all_stopped(results: Sequence[Stopped]) -> None:
    """Raises CellError with all problems in one line."""
    problems = [f"host {r.host}: {r.problem}" for r in results if r.problem is not None]
    if problems:
        raise CellError("; ".join(problems))


def _stop_serving(file: ClusterFile, seconds: float) -> None:
    """A head of one's own that is not reached is told later, as a host."""
    script = stop_serving(file.name, seconds)
    answer = remote.run(remote.on_head(file, script), seconds + HOST_SECONDS)
    for line in answer.output.splitlines():
        if line.startswith(NOT_DRAINED):
            print(line, file=sys.stderr, flush=True)
    if answer.code != 0 and not file.is_local:
        print(
            f"no head was reached, so nothing has drained: {answer.reason}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _stop_own_machines(file: ClusterFile) -> None:
    """The head first: it would start Ray again on workers that lose it."""
    head, workers = file.hosts[0], file.hosts[1:]
    results = [_stop_one(file, head)]
    with ThreadPoolExecutor(remote.MAX_AT_ONCE) as pool:
        results += pool.map(lambda host: _stop_one(file, host), workers)
    for result in results:
        print(
            f"host {result.host}: {result.problem or 'nothing runs'}", file=sys.stderr, flush=True
        )
    check_all_stopped(results)
    _forget(file)


def _stop_one(file: ClusterFile, host: str) -> Stopped:
    script = stop_host(file.name, file.programs)
    return stopped_of(host, remote.run(remote.on_host(file, host, script), HOST_SECONDS))


def _forget(file: ClusterFile) -> None:
    """What `ray up` has noted on this machine: that the head runs. With it, the next one would not begin anew."""
    from ray.autoscaler._private.local.config import get_lock_path, get_state_path

    for path in (get_state_path(file.name), get_lock_path(file.name)):
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()


def _end_instances(file: ClusterFile) -> None:
    """By the cloud, which also knows what is left. Raises CellError, also when that cannot be asked."""
    ended = remote.run(remote.ray_launcher("down", "-y", str(file.path)), RAY_DOWN_SECONDS)
    if ended.code != 0:
        raise CellError(f"ray down {file.path} failed: {ended.reason}")
    check_all_ended(listed_instances(file))
    print(
        f"the {file.provider} provider lists no head and no worker of cluster {file.name} any more",
        file=sys.stderr,
        flush=True,
    )


def check_all_ended(left: Instances) -> None:
    if left.heads or left.workers:
        raise CellError(
            f"still there after ray down: {left}; pointsman down again, or end them in the cloud"
        )
