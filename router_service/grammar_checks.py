"""Grammars of requests, compiled in a process of their own before the engine hears of them."""

import asyncio
import hashlib
import itertools
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import msgspec

from cluster.errors import CellError, OverloadedError, PointsmanError, RequestError
from router_service.grammar_child import GrammarAnswer, GrammarQuestion
from router_service.requested_grammar import GrammarSource

MAX_WAITING = 256
"""Grammars that wait to be compiled."""
MAX_WAITING_OF_A_TENANT = 64
MAX_KNOWN = 256
"""Grammars whose answer is remembered, also of those that were refused."""


class Compiling(Protocol):
    """See `GrammarProcess`."""

    def ask(self, question: GrammarQuestion) -> GrammarAnswer: ...

    def give_up(self, number: int) -> None: ...

    def close(self) -> None: ...

    def forget(self) -> None: ...


@dataclass(frozen=True)
class Asker:
    """Who shares what: what one of them has sent tells no other one by how long it takes."""

    tenant: str | None
    cache_salt: str | None = None


@dataclass(frozen=True)
class _Waiting:
    key: bytes
    """Of whom asks and what."""
    question: GrammarQuestion
    answer: "asyncio.Future[GrammarAnswer]"


class GrammarChecks:
    """Owner of the questions that wait, of what is known of earlier ones, and of the process. Used from one event loop.

    One grammar is compiled at a time, of one tenant after the other. Whoever stops waiting takes its question along,
    also out of the process.
    """

    def __init__(self, process: Compiling) -> None:
        """process: asked on a thread; closed with this."""
        self._process = process
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._known: OrderedDict[bytes, GrammarAnswer] = OrderedDict()
        self._numbers = itertools.count()
        self._waiting: OrderedDict[str | None, deque[_Waiting]] = OrderedDict()
        """By tenant, whose turn it is first; none is empty."""
        self._asking: asyncio.Task[None] | None = None
        self._closed = False

    def close(self) -> None:
        """Ends the process, also while it compiles; what is asked fails. Does not wait for that."""
        self._closed = True
        self._process.close()
        while (waiting := self._next()) is not None:
            _fail(waiting, CellError("the server is stopping"))
        self._thread.submit(self._process.forget)
        self._thread.shutdown(wait=False)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def checked(self, source: GrammarSource, asker: Asker) -> str:
        """The grammar as it travels. Raises RequestError naming the field, of a part where one is the reason;
        OverloadedError where too many wait."""
        answer = await self._answer(source, asker)
        if answer.grammar is not None:
            return answer.grammar
        if not answer.took_too_long:
            await self._check_parts(source, asker)
        raise _refusal(source, answer, source.remedy)

    async def _check_parts(self, source: GrammarSource, asker: Asker) -> None:
        """Up to the first that is wrong; together they take about as long as the whole did. Raises RequestError."""
        for part in source.parts:
            answer = await self._answer(part, asker)
            if answer.grammar is None:
                raise _refusal(part, answer, source.remedy)

    async def _answer(self, source: GrammarSource, asker: Asker) -> GrammarAnswer:
        key = _key(source, asker)
        if (known := self._recalled(key)) is not None:
            return known
        question = GrammarQuestion(next(self._numbers), source.kind, source.text, source.preface)
        waiting = _Waiting(key, question, asyncio.get_running_loop().create_future())
        self._add(waiting, asker.tenant)
        try:
            return await waiting.answer
        finally:
            self._leave(waiting, asker.tenant)

    def _recalled(self, key: bytes) -> GrammarAnswer | None:
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
        return known

    def _add(self, waiting: _Waiting, tenant: str | None) -> None:
        if self._closed:
            raise CellError("the server is stopping")
        queue = self._waiting.get(tenant, deque())
        if len(queue) >= MAX_WAITING_OF_A_TENANT or self.num_waiting >= MAX_WAITING:
            raise OverloadedError(
                f"{len(queue)} grammars of yours and {self.num_waiting} of all clients wait to be compiled, the "
                f"limits are {MAX_WAITING_OF_A_TENANT} and {MAX_WAITING}; try again later"
            )
        queue.append(waiting)
        self._waiting[tenant] = queue
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_all())

    def _leave(self, waiting: _Waiting, tenant: str | None) -> None:
        """Without an answer the question is dropped, and given up if it is asked just now."""
        queue = self._waiting.get(tenant)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            if not queue:
                del self._waiting[tenant]
        elif waiting.answer.cancelled():
            self._process.give_up(waiting.question.number)

    def _next(self) -> _Waiting | None:
        """Of the tenant whose turn it is, which is the last one then."""
        if not self._waiting:
            return None
        tenant, queue = self._waiting.popitem(last=False)
        waiting = queue.popleft()
        if queue:
            self._waiting[tenant] = queue
        return waiting

    async def _ask_all(self) -> None:
        """Until none waits."""
        try:
            while (waiting := self._next()) is not None:
                await self._ask(waiting)
        finally:
            self._asking = None

    async def _ask(self, waiting: _Waiting) -> None:
        """Of two that wait for the same, the second one is answered by what is known then."""
        answer = self._recalled(waiting.key)
        if answer is None:
            loop = asyncio.get_running_loop()
            try:
                answer = await loop.run_in_executor(
                    self._thread, self._process.ask, waiting.question
                )
            except PointsmanError as error:
                _fail(waiting, error)
                return
            self._known[waiting.key] = answer
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        if not waiting.answer.done():
            waiting.answer.set_result(answer)


def _key(source: GrammarSource, asker: Asker) -> bytes:
    parts = (asker.tenant, asker.cache_salt, source.kind, source.text, source.preface)
    return hashlib.sha256(msgspec.json.encode(parts)).digest()


def _fail(waiting: _Waiting, error: PointsmanError) -> None:
    if not waiting.answer.done():
        waiting.answer.set_exception(error)


def _refusal(source: GrammarSource, answer: GrammarAnswer, remedy: str) -> RequestError:
    return RequestError(f"{source.field}: {answer.error}{remedy}", field=source.field)
