"""Many ranks for real: forked processes that meet over gloo on loopback, with a deadline and named failures.

Forked, because importing torch once per rank would cost seconds each.
"""

import contextlib
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from expert_workers.ep_group import GroupOptions, join_group, leave_group
from expert_workers.exchange.torch_group import TorchGroupExchange

LOOPBACK = "127.0.0.1"
_LEAVE_SECONDS = 2.0
"""For the end of a process that has answered; one that has not is killed after it."""


@dataclass(frozen=True)
class RankContext:
    """What a function under `run_ranks` is given."""

    rank: int
    ep_size: int
    store_file: Path
    exchange_timeout_seconds: float

    def store(self, generation: str = "first") -> FileStore:
        """Where the ranks meet. A file: a TCP store looks up host names, which may take seconds."""
        return FileStore(f"{self.store_file}-{generation}", self.ep_size)

    @property
    def group_options(self) -> GroupOptions:
        return GroupOptions(
            rank=self.rank,
            ep_size=self.ep_size,
            exchange="gloo",
            host_address=LOOPBACK,
            store_address=LOOPBACK,
            store_port=0,
            join_timeout_seconds=30.0,
            exchange_timeout_seconds=self.exchange_timeout_seconds,
        )

    def exchange(self) -> TorchGroupExchange:
        """Joins the group; once per process."""
        return TorchGroupExchange(join_group(self.group_options, self.store()).process_group)


class RanksFailedError(AssertionError):
    """At least one rank raised, died or did not finish; the message names each with its traceback."""


def run_ranks(
    ep_size: int,
    function: Callable[[RankContext], Any],
    *,
    deadline_seconds: float = 60.0,
    exchange_timeout_seconds: float = 20.0,
    may_die: frozenset[int] = frozenset(),
) -> list[Any]:
    """Runs `function(context)` in one forked process per rank and returns what each returned, in rank order.

    Results cross by pickle. Ranks in `may_die` may end without an answer; theirs is None.
    """
    with tempfile.TemporaryDirectory() as directory:
        contexts = [
            RankContext(rank, ep_size, Path(directory) / "store", exchange_timeout_seconds)
            for rank in range(ep_size)
        ]
        answers = _run_all(function, contexts, deadline_seconds)
    failures = [
        f"rank {rank} {answer.problem}"
        for rank, answer in enumerate(answers)
        if answer.problem is not None and not (answer.died and rank in may_die)
    ]
    if failures:
        raise RanksFailedError("\n".join(failures))
    return [answer.value for answer in answers]


@dataclass(frozen=True)
class _Answer:
    value: Any = None
    problem: str | None = None
    died: bool = False


def _run_all(
    function: Callable[[RankContext], Any], contexts: list[RankContext], deadline_seconds: float
) -> list[_Answer]:
    forks = [_fork(function, context) for context in contexts]
    try:
        answers = _collect([end for _, end in forks], deadline_seconds)
        for _, end in forks:
            _let_go(end)
        return answers
    finally:
        for process, end in forks:
            _end(process, end)


def _fork(
    function: Callable[[RankContext], Any], context: RankContext
) -> tuple[BaseProcess, Connection]:
    forking = multiprocessing.get_context("fork")
    ours, theirs = forking.Pipe()
    process = forking.Process(target=_run_one, args=(function, context, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _run_one(
    function: Callable[[RankContext], Any], context: RankContext, parent: Connection
) -> None:
    torch.set_num_threads(1)
    try:
        parent.send_bytes(pickle.dumps(_Answer(value=function(context))))
        parent.recv_bytes()  # until all have answered: peers may still be in their last exchange
    except BaseException:
        problem = f"raised:\n{traceback.format_exc()}"
        parent.send_bytes(pickle.dumps(_Answer(problem=problem)))
    leave_group()


def _collect(ends: list[Connection], deadline_seconds: float) -> list[_Answer]:
    deadline = time.monotonic() + deadline_seconds
    answers = [_Answer(problem=f"did not finish within {deadline_seconds:g} s")] * len(ends)
    open_ends = dict(zip(ends, range(len(ends)), strict=True))
    while open_ends and (left := deadline - time.monotonic()) > 0:
        for end in wait(list(open_ends), left):
            assert isinstance(end, Connection)
            rank = open_ends.pop(end)
            try:
                answers[rank] = pickle.loads(end.recv_bytes())
            except EOFError:
                answers[rank] = _Answer(problem="died without an answer", died=True)
    return answers


def _let_go(end: Connection) -> None:
    with contextlib.suppress(OSError):  # a dead rank needs no word
        end.send_bytes(b"leave")


def _end(process: BaseProcess, end: Connection) -> None:
    process.join(timeout=_LEAVE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    end.close()
    process.close()
