"""The process that compiles what clients send, so that a grammar can be given up.

`python -m router_service.grammar_child VOCABULARY`: one line of JSON in, one line out, until its input ends. It has the
model's vocabulary ready and forks a process for every grammar: one that takes longer than it may is ended by SIGPROF,
whatever it is doing (compilation has no other bound), one that nobody waits for any more by SIGKILL, and the next one
starts at once.
"""

import os
import select
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from cluster.errors import GrammarError
from cluster.grammar import (
    GrammarCompiler,
    GrammarKind,
    GrammarState,
    grammar_text,
    load_grammar_compiler,
)

MAX_COMPILE_SECONDS = 0.5
"""Of CPU time. A rank takes as long for the same grammar."""
PROBED_TOKENS = 4
"""First ones of two answers, which a grammar must bear without coming to its limits."""
_PIECE_BYTES = 2**16


class Vocabulary(msgspec.Struct, frozen=True):
    """The process's only argument, as JSON."""

    model_dir: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarQuestion(msgspec.Struct, frozen=True, tag=True):
    number: int
    kind: GrammarKind
    source: str
    preface: str | None = None


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the answer to this question."""

    number: int


class GrammarAnswer(msgspec.Struct, frozen=True):
    """grammar: as it travels; None where `error` says why not."""

    grammar: str | None
    error: str | None
    took_too_long: bool = False


class Ended(msgspec.Struct, frozen=True, tag=True):
    """There is no answer: the process that worked on it ended with this exit code."""

    code: int


class Answered(msgspec.Struct, frozen=True, tag=True):
    answer: GrammarAnswer


ToGrammarChild = GrammarQuestion | GiveUp
FromGrammarChild = Answered | Ended
TOOK_TOO_LONG = GrammarAnswer(
    None, f"takes over {MAX_COMPILE_SECONDS} s to compile; make it simpler", took_too_long=True
)


@dataclass(frozen=True)
class Checker:
    """Compiles and tries out."""

    compiler: GrammarCompiler
    eos_token_ids: tuple[int, ...]

    def answer(self, question: GrammarQuestion) -> GrammarAnswer:
        """Takes as long as it takes."""
        try:
            grammar = grammar_text(question.kind, question.source)
            state = self.compiler.start(grammar)
            for which in (-1, 0):
                self._try_out(state, which)
            if question.preface is not None:
                grammar = grammar_text(question.kind, question.source, question.preface)
                self.compiler.start(grammar).allowed_after(np.zeros(0, np.int32))
        except GrammarError as error:
            return GrammarAnswer(None, str(error))
        return GrammarAnswer(grammar, None)

    def _try_out(self, state: GrammarState, which: int) -> None:
        """Follows the answer of the last, or the first, of the ids that may come. Raises GrammarError."""
        token_ids: list[int] = []
        while len(token_ids) <= PROBED_TOKENS:
            allowed = state.allowed_after(np.array(token_ids, np.int32))
            going_on = np.setdiff1d(np.flatnonzero(allowed), self.eos_token_ids)
            if not len(going_on):
                return
            token_ids.append(int(going_on[which]))


class _Lines:
    """Owner of what has arrived and is not read yet."""

    def __init__(self, source: int) -> None:
        self.source = source
        self._data = b""
        self._decoder = msgspec.json.Decoder(ToGrammarChild)

    @property
    def has_next(self) -> bool:
        """One is there already."""
        return b"\n" in self._data

    def next(self) -> ToGrammarChild | None:
        """Waits for it; None at the end."""
        while not self.has_next:
            piece = os.read(self.source, _PIECE_BYTES)
            if not piece:
                return None
            self._data += piece
        line, _, self._data = self._data.partition(b"\n")
        return self._decoder.decode(line)


def serve(vocabulary: Vocabulary, source: int, sink: int) -> None:
    """Until `source` ends."""
    checker, lines = _checker(vocabulary), _Lines(source)
    while (message := lines.next()) is not None:
        if isinstance(message, GrammarQuestion):  # who gives up what is answered is too late
            _write(sink, msgspec.json.encode(_outcome(checker, message, lines)) + b"\n")


def _outcome(
    checker: Checker | GrammarError, question: GrammarQuestion, lines: _Lines
) -> FromGrammarChild:
    if isinstance(checker, GrammarError):
        return Answered(GrammarAnswer(None, str(checker)))
    result, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _work(checker, question, write_end)
    os.close(write_end)
    data = _read(result, pid, question, lines)
    os.close(result)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == -signal.SIGPROF:
        return Answered(TOOK_TOO_LONG)
    return Ended(code) if code else Answered(msgspec.json.decode(data, type=GrammarAnswer))


def _work(checker: Checker, question: GrammarQuestion, sink: int) -> None:
    """In the forked process, which ends."""
    try:
        signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_SECONDS)
        said = checker.answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sink, msgspec.json.encode(said))
        os._exit(0)
    finally:
        os._exit(1)


def _read(result: int, pid: int, question: GrammarQuestion, lines: _Lines) -> bytes:
    """All that the forked process writes; it is ended if nobody wants that any more."""
    data = b""
    watched = [result, lines.source]
    while True:
        ready = select.select(watched, [], [], 0 if lines.has_next else None)[0]
        if lines.has_next or lines.source in ready:
            message = lines.next()
            if message is None or message == GiveUp(question.number):
                os.kill(pid, signal.SIGKILL)
            if message is None:
                watched = [result]
        if result in ready:
            piece = os.read(result, _PIECE_BYTES)
            if not piece:
                return data
            data += piece


def _write(sink: int, data: bytes) -> None:
    while data:
        data = data[os.write(sink, data) :]


def _checker(vocabulary: Vocabulary) -> Checker | GrammarError:
    try:
        compiler = load_grammar_compiler(
            Path(vocabulary.model_dir),
            vocab_size=vocabulary.vocab_size,
            eos_token_ids=vocabulary.eos_token_ids,
        )
    except GrammarError as error:
        return error
    return Checker(compiler, vocabulary.eos_token_ids)


if __name__ == "__main__":
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whatever the server's process does with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    with suppress(BrokenPipeError):  # whoever asked is gone
        serve(msgspec.json.decode(sys.argv[1], type=Vocabulary), 0, 1)
