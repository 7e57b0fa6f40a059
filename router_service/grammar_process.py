"""The other end of `grammar_child`: a process that is asked one question after the other."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import msgspec

from cluster.errors import CellError
from router_service.grammar_child import (
    Answered,
    FromGrammarChild,
    GiveUp,
    GrammarAnswer,
    GrammarQuestion,
    ToGrammarChild,
    Vocabulary,
)

ANSWER_SECONDS = 60.0
"""Until the process must have answered: it gets its half second of CPU in that time on any host that lives."""
_NUMBER_BYTES = 8
_PIECE_BYTES = 2**16


class GrammarProcess:
    """Owner of the process, which is started for the first question and again if it has ended.

    `ask` waits, so call it on a thread, one at a time; `give_up` and `close` return at once, from any thread.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        """Held while a process is started or forgotten, so that none is after `close`."""
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up, self._giving_up = os.pipe()
        os.set_blocking(self._giving_up, False)
        self._decoder = msgspec.json.Decoder(FromGrammarChild)

    @property
    def pid(self) -> int | None:
        """None where no process runs."""
        return None if self._process is None else self._process.pid

    def ask(self, question: GrammarQuestion) -> GrammarAnswer:
        """Numbers of questions grow. Raises CellError: given up, closed, or the process failed."""
        process = self._running()
        line = self._exchanged(process, question)
        if not line:
            code = self._end()
            raise CellError(
                f"the process that compiles grammars ended with {code} or was silent for "
                f"{ANSWER_SECONDS:.0f} s; try again"
            )
        told = self._decoder.decode(line)
        if isinstance(told, Answered):
            return told.answer
        raise CellError(f"the compilation of the grammar ended with {told.code}; try again")

    def give_up(self, number: int) -> None:
        """The question with this number, if it is asked just now."""
        with suppress(BlockingIOError), self._lock:
            if not self._closed:
                os.write(self._giving_up, number.to_bytes(_NUMBER_BYTES))

    def close(self) -> None:
        """Ends the process, also while it compiles; what is asked fails."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _kill(self._process)

    def forget(self) -> None:
        """After `close`, where `ask` is called: takes leave of the process."""
        self._end()
        os.close(self._given_up)
        os.close(self._giving_up)

    def _running(self) -> subprocess.Popen[bytes]:
        """Raises CellError after `close`."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        with self._lock:
            if self._closed:
                raise CellError("the server is stopping")
            if self._process is None:
                arguments = msgspec.json.encode(self._vocabulary).decode()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "router_service.grammar_child", arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    process_group=0,
                )
            return self._process

    def _end(self) -> int | None:
        """The exit code; the process is gone afterwards, and what it has forked ends with it."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return None
        _kill(process)
        with suppress(BrokenPipeError), process:  # it may not have read all that it was sent
            process.wait()
        return process.returncode

    def _exchanged(self, process: subprocess.Popen[bytes], question: GrammarQuestion) -> bytes:
        """The answer's line; empty where the process ended before there was one, or did not answer in time."""
        assert process.stdout is not None
        if not _sent(process, question):
            return b""
        answers = process.stdout.fileno()
        deadline, data = time.monotonic() + ANSWER_SECONDS, b""
        while not data.endswith(b"\n"):
            remaining = max(0.0, deadline - time.monotonic())
            ready = select.select([answers, self._given_up], [], [], remaining)[0]
            if not ready:
                return b""
            if self._given_up in ready:
                self._pass_on(process, question)
            if answers in ready:
                piece = os.read(answers, _PIECE_BYTES)
                if not piece:
                    return b""
                data += piece
        return data

    def _pass_on(self, process: subprocess.Popen[bytes], question: GrammarQuestion) -> None:
        """A number; one that was answered meanwhile is passed over."""
        number = int.from_bytes(os.read(self._given_up, _NUMBER_BYTES))
        if number == question.number:
            _sent(process, GiveUp(number))  # where it has ended, so much the better


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it has forked, which is of its group."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _sent(process: subprocess.Popen[bytes], message: ToGrammarChild) -> bool:
    """Whether the process lives to read it."""
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(message) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return False
    return True
