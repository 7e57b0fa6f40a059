"""Grammars of requests, compiled in a process of their own before the engine hears of them."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from cluster.errors import CellError, OverloadedError, RequestError
from router_service.grammar_child import (
    MAX_COMPILE_SECONDS,
    GrammarAnswer,
    GrammarQuestion,
    Vocabulary,
)
from router_service.requested_grammar import GrammarSource

MAX_WAITING = 64
"""Grammars that wait to be compiled."""
MAX_KNOWN = 256
ANSWER_SECONDS = 60.0
"""Until the process must have answered or ended: it gets its half second of CPU in that time on any host that lives."""


class GrammarChecks:
    """Owner of the process, which is started for the first grammar and again after one that took too long.

    A thread of its own starts it, asks it and waits for its end; the event loop only kills it.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._starting = threading.Lock()
        """Held while a process is started, so that none is after `close`."""
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[GrammarQuestion, str] = OrderedDict()
        self._num_waiting = 0

    def close(self) -> None:
        """Ends the process, also while it compiles; what is asked fails. Does not wait for that."""
        with self._starting:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    async def checked(self, source: GrammarSource) -> str:
        """The grammar as it travels. Raises RequestError naming the field, of a part where one is the reason;
        OverloadedError where too many wait."""
        question = GrammarQuestion(source.kind, source.text)
        known = self._known.get(question)
        if known is not None:
            self._known.move_to_end(question)
            return known
        answer = await self._answer(question)
        if answer.grammar is None:
            if not answer.took_too_long:
                await self._check_parts(source)
            message = f"{source.field}: {answer.error}{source.remedy}"
            raise RequestError(message, field=source.field)
        self._known[question] = answer.grammar
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return answer.grammar

    async def _check_parts(self, source: GrammarSource) -> None:
        """Up to the first that is wrong; together they take about as long as the whole did. Raises RequestError."""
        for part in source.parts:
            answer = await self._answer(GrammarQuestion(part.kind, part.text))
            if answer.grammar is None:
                message = f"{part.field}: {answer.error}{source.remedy}"
                raise RequestError(message, field=part.field)

    async def _answer(self, question: GrammarQuestion) -> GrammarAnswer:
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError(f"{MAX_WAITING} grammars wait to be compiled; try again later")
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._ask, question)
        finally:
            self._num_waiting -= 1

    # --- on the thread

    def _ask(self, question: GrammarQuestion) -> GrammarAnswer:
        process = self._running()
        if process is None:
            raise CellError("the server is stopping")
        line = _exchanged(process, msgspec.json.encode(question))
        if line:
            return msgspec.json.decode(line, type=GrammarAnswer)
        ended = self._end()
        if ended == -signal.SIGPROF:
            return GrammarAnswer(
                None,
                f"takes over {MAX_COMPILE_SECONDS} s to compile; make it simpler",
                took_too_long=True,
            )
        raise CellError(
            f"the process that compiles grammars ended with {ended} or was silent for "
            f"{ANSWER_SECONDS:.0f} s; try again"
        )

    def _running(self) -> subprocess.Popen[bytes] | None:
        """The process; None after `close`."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        with self._starting:
            if self._process is None and not self._closed:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "router_service.grammar_child",
                        msgspec.json.encode(self._vocabulary).decode(),
                    ],
                    stdin=subprocess.PIPE,
                    process_group=0,
                    stdout=subprocess.PIPE,
                )
            return self._process

    def _end(self) -> int | None:
        """The exit code; the process is gone afterwards."""
        with self._starting:
            process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        with suppress(BrokenPipeError), process:  # it may not have read all that it was sent
            process.wait()
        return process.returncode


def _exchanged(process: subprocess.Popen[bytes], question: bytes) -> bytes:
    """The answer's line; empty where the process ended before there was one, or did not answer in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(question + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    deadline, data = time.monotonic() + ANSWER_SECONDS, b""
    while not data.endswith(b"\n"):
        remaining = max(0.0, deadline - time.monotonic())
        if not select.select([process.stdout], [], [], remaining)[0]:
            return b""
        piece = os.read(process.stdout.fileno(), 2**16)
        if not piece:
            return b""
        data += piece
    return data
