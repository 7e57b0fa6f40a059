"""`pointsman up`: Ray on every host of a cluster file, then `pointsman serve` on the head, until that is ready."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cluster.errors import CellError, ConfigError, DeadlineError
from deploy import remote
from deploy.cloud_instances import listed_instances
from deploy.cluster_file import ClusterFile
from deploy.remote_scripts import (
    follow_log,
    log_of,
    refuse_if_serving,
    serving_process,
    start_serving,
)

RAY_UP_SECONDS = 1800.0
"""A cloud may have to make the machines first."""
READY_SECONDS = 3600.0
"""Hosts and cell have deadlines of their own: `cluster.hosts_timeout_seconds`, `cell.start_timeout_seconds`."""
SHORT_SECONDS = 120.0
TOKEN_SECONDS = 60.0
THE_HEAD = "the head"
"""Of a cloud, which alone knows its address."""
_REMEDY = "; nothing was started: let this machine reach every host, or end what is left of it (pointsman down)"
_MAP = re.compile(r"host \S+: rank \d+ on ")
_READY = "pointsman is ready: "
_FAILURE = "pointsman: "
_WARNING = "pointsman: warning: "


def up(file: ClusterFile, serve_arguments: Sequence[str]) -> int:
    """Standard output gets the map of ranks and the ready line, standard error all the rest.

    Raises ConfigError for what is missing here, CellError when it does not get ready; hosts that are up stay up then.
    """
    _check_programs()
    check_key(file)
    _make_token(file)
    check_before_ray_up(file)
    _ray_up(file)
    _start(file, serve_arguments)
    told = _follow(file)
    print("\n".join(told), flush=True)
    print(
        f"log: {log_of(file.name)} on the head; pointsman down {file.path} ends it", file=sys.stderr
    )
    return 0


def hosts_settings(file: ClusterFile) -> list[str]:
    """Flags of `serve` that make it wait for the file's hosts."""
    hosts = ", ".join(f'"{host}"' for host in file.hosts)
    expected = f"cluster.hosts=[{hosts}]" if hosts else f"cluster.num_hosts={file.num_hosts}"
    return ["--address", "auto", "--set", expected]


def result_in(lines: Iterable[str]) -> tuple[str, ...]:
    """The map of ranks and the ready line, as soon as they are told. Raises CellError with why it ended instead."""
    told: list[str] = []
    last = "its log says nothing"
    for line in lines:
        print(line, file=sys.stderr, flush=True)
        if _MAP.match(line):
            told.append(line)
        if line.startswith(_READY):
            return (*told, line)
        if line.startswith(_FAILURE) and not line.startswith(_WARNING):
            last = line.removeprefix(_FAILURE)
    raise CellError(f"pointsman serve ended on the head: {last}")


def _check_programs() -> None:
    for program, package in (("ssh", "openssh-client"), ("rsync", "rsync")):
        if shutil.which(program) is None:
            raise ConfigError(f"ray up needs {program} on this machine: install {package}")


def _make_token(file: ClusterFile) -> None:
    """Once per user: whoever has it may run code on the hosts."""
    if file.token_file is None or file.token_file.exists():
        return
    made = remote.run([remote.own_program("ray"), "get-auth-token", "--generate"], TOKEN_SECONDS)
    if made.code != 0 or not file.token_file.exists():
        raise ConfigError(
            f"no token for Ray at {file.token_file}, which file_mounts names: {made.reason}; make it with "
            "ray get-auth-token --generate"
        )
    file.token_file.chmod(0o600)  # Ray leaves that to the umask, and rsync keeps it


def check_key(file: ClusterFile) -> None:
    """ssh would go on without it and be refused everywhere. Raises ConfigError."""
    if file.ssh_key is not None and not Path(file.ssh_key).expanduser().is_file():
        raise ConfigError(
            f"{file.path}: auth.ssh_private_key {file.ssh_key}: no such file on this machine"
        )


def check_before_ray_up(file: ClusterFile) -> None:
    """`ray up` would take Ray from under what serves, and begin with hosts that it does not reach. Raises CellError."""
    question = refuse_if_serving(file.name)
    if file.is_local:
        answers = remote.on_hosts(file, question, SHORT_SECONDS)
    elif listed_instances(file).heads:
        answers = {THE_HEAD: remote.run(remote.on_head(file, question), SHORT_SECONDS)}
    else:
        return
    for problem in refusals(file, answers):
        raise CellError(problem)


def refusals(file: ClusterFile, answers: Mapping[str, remote.Answer]) -> tuple[str, ...]:
    """Of a start on these hosts, by what they have answered to `refuse_if_serving`; empty when it may begin."""
    serving = {host: serving_process(answer.output) for host, answer in answers.items()}
    for host, process in serving.items():
        if process is not None:
            return (
                f"cluster {file.name} serves already (process {process} on {host}): "
                f"pointsman down {file.path} first",
            )
    silent = [
        f"{_named(host)}: not reached by ssh: {answer.reason}"
        for host, answer in answers.items()
        if answer.code != 0
    ]
    return ("; ".join(silent) + _REMEDY,) if silent else ()


def _named(host: str) -> str:
    return host if host == THE_HEAD else f"host {host}"


def _ray_up(file: ClusterFile) -> None:
    command = remote.ray_launcher("up", "-y", "--no-config-cache", str(file.path))
    print(f"ray up {file.path}: {file.num_hosts} hosts", file=sys.stderr, flush=True)
    try:
        code = subprocess.run(
            command, stdout=sys.stderr, stdin=subprocess.DEVNULL, timeout=RAY_UP_SECONDS
        ).returncode
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"ray up did not end within {RAY_UP_SECONDS:g} s") from error
    if code != 0:
        raise CellError(f"ray up {file.path} ended with {code}; its lines above say why")


def _start(file: ClusterFile, serve_arguments: Sequence[str]) -> None:
    arguments = [*hosts_settings(file), *serve_arguments]
    script = start_serving(file.name, file.programs, arguments)
    answer = remote.run(remote.on_head(file, script), SHORT_SECONDS)
    if answer.code != 0:
        raise CellError(f"pointsman serve was not started on the head: {answer.reason}")


def _follow(file: ClusterFile) -> tuple[str, ...]:
    """A connection that breaks is made again; what serves does not notice."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        lines = remote.lines_of(
            remote.on_head(file, follow_log(file.name)), deadline - time.monotonic()
        )
        try:
            return result_in(lines)
        except DeadlineError as error:
            raise DeadlineError(
                f"not ready in time: see {log_of(file.name)} on the head"
            ) from error
        except CellError:
            if serving_process(_ask_if_serving(file).output) is None:
                raise


def _ask_if_serving(file: ClusterFile) -> remote.Answer:
    return remote.run(remote.on_head(file, refuse_if_serving(file.name)), SHORT_SECONDS)
