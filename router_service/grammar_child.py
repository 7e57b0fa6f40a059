"""The process that compiles what clients send, so that a grammar can be given up.

`python -m router_service.grammar_child VOCABULARY`: one line of JSON in, one line out, until its input ends. A grammar
that takes longer than it may ends the process by SIGPROF, whatever it is doing: compilation has no other bound.
"""

import signal
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from cluster.errors import GrammarError
from cluster.grammar import GrammarCompiler, GrammarKind, grammar_text, load_grammar_compiler

MAX_COMPILE_SECONDS = 0.5
"""Of CPU time. A rank that compiles the same grammar stands still as long, and the cell with it."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The process's only argument, as JSON."""

    model_dir: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarQuestion(msgspec.Struct, frozen=True):
    kind: GrammarKind
    source: str


class GrammarAnswer(msgspec.Struct, frozen=True):
    """grammar: as it travels; None where `error` says why not."""

    grammar: str | None
    error: str | None
    took_too_long: bool = False


def answer(compiler: GrammarCompiler, question: GrammarQuestion) -> GrammarAnswer:
    """Takes as long as it takes."""
    try:
        grammar = grammar_text(question.kind, question.source)
        compiler.start(grammar).allowed_after(np.zeros(0, np.int32))
    except GrammarError as error:
        return GrammarAnswer(None, str(error))
    return GrammarAnswer(grammar, None)


def serve(vocabulary: Vocabulary, questions: BinaryIO, answers: BinaryIO) -> None:
    compiler: GrammarCompiler | GrammarError
    try:
        compiler = load_grammar_compiler(
            Path(vocabulary.model_dir),
            vocab_size=vocabulary.vocab_size,
            eos_token_ids=vocabulary.eos_token_ids,
        )
    except GrammarError as error:
        compiler = error
    for line in questions:
        question = msgspec.json.decode(line, type=GrammarQuestion)
        if isinstance(compiler, GrammarError):
            said = GrammarAnswer(None, str(compiler))
        else:
            signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_SECONDS)
            said = answer(compiler, question)
            signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(msgspec.json.encode(said) + b"\n")
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whatever the server's process does with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    serve(msgspec.json.decode(sys.argv[1], type=Vocabulary), sys.stdin.buffer, sys.stdout.buffer)
