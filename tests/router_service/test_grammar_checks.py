"""Grammars that wait to be compiled: whose turn it is, what is remembered, what becomes of those that are given up."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest

from cluster.errors import CellError, OverloadedError, RequestError
from cluster.grammar import GrammarKind
from router_service.grammar_checks import MAX_WAITING_OF_A_TENANT, Asker, GrammarChecks
from router_service.grammar_child import GrammarAnswer, GrammarQuestion, Vocabulary
from router_service.grammar_process import GrammarProcess
from router_service.requested_grammar import GrammarSource
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

VOCABULARY = Vocabulary(str(DEMO_MODEL_DIR), 3072, (2, 0))
BOMB = {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(30)]}
ANYBODY = Asker(None)


def regex(text: str) -> GrammarSource:
    return GrammarSource("guided_regex", "regex", text)


class Compiler:
    """One that answers when it is let: no to what has an "x", yes to the rest."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.given_up: list[int] = []
        self.may_answer = threading.Event()

    def ask(self, question: GrammarQuestion) -> GrammarAnswer:
        self.asked.append(question.source)
        assert self.may_answer.wait(20)
        if "x" in question.source:
            return GrammarAnswer(None, "no x, please")
        return GrammarAnswer(f"grammar of {question.source}", None)

    def give_up(self, number: int) -> None:
        self.given_up.append(number)

    def close(self) -> None:
        self.may_answer.set()

    def forget(self) -> None:
        pass


def checked(work: Callable[[GrammarChecks, Compiler], Awaitable[None]]) -> Compiler:
    """After `work` with one."""

    async def run() -> Compiler:
        compiler = Compiler()
        checks = GrammarChecks(compiler)
        try:
            async with asyncio.timeout(20):
                await work(checks, compiler)
        finally:
            checks.close()
        return compiler

    return asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.001)


def test_tenants_take_turns() -> None:
    async def work(checks: GrammarChecks, compiler: Compiler) -> None:
        asked = [*(("one", f"a{n}") for n in range(3)), ("two", "b0"), ("two", "b1")]
        tasks = [asyncio.create_task(checks.checked(regex(t), Asker(who))) for who, t in asked]
        await until(lambda: checks.num_waiting == 4)
        compiler.may_answer.set()
        await asyncio.gather(*tasks)

    assert checked(work).asked == ["a0", "b0", "a1", "b1", "a2"]


def test_one_tenant_cannot_take_all_places() -> None:
    async def work(checks: GrammarChecks, compiler: Compiler) -> None:
        texts = [str(n) for n in range(MAX_WAITING_OF_A_TENANT)]
        tasks = [asyncio.create_task(checks.checked(regex(t), Asker("one"))) for t in texts]
        await until(lambda: len(compiler.asked) == 1)
        tasks.append(asyncio.create_task(checks.checked(regex("one more"), Asker("one"))))
        await until(lambda: checks.num_waiting == MAX_WAITING_OF_A_TENANT)
        with pytest.raises(OverloadedError, match=str(MAX_WAITING_OF_A_TENANT)):
            await checks.checked(regex("two more"), Asker("one"))
        tasks.append(asyncio.create_task(checks.checked(regex("other"), Asker("two"))))
        compiler.may_answer.set()
        await asyncio.gather(*tasks)

    checked(work)


def test_whoever_leaves_takes_its_question_along() -> None:
    async def work(checks: GrammarChecks, compiler: Compiler) -> None:
        tasks = [asyncio.create_task(checks.checked(regex(t), ANYBODY)) for t in "abcd"]
        await until(lambda: checks.num_waiting == 3)
        for task in tasks[:3]:
            task.cancel()
        await asyncio.wait(tasks[:3])
        assert checks.num_waiting == 1
        assert len(compiler.given_up) == 1
        compiler.may_answer.set()
        assert await tasks[3] == "grammar of d"

    assert checked(work).asked == ["a", "d"]


@pytest.mark.parametrize(
    ("text", "expected"), [("a", "grammar of a"), ("x", "guided_regex: no x, please")]
)
def test_an_answer_is_remembered_for_those_who_may_know_of_it(text: str, expected: str) -> None:
    async def told(checks: GrammarChecks, asker: Asker) -> str:
        try:
            return await checks.checked(regex(text), asker)
        except RequestError as error:
            return str(error)

    async def work(checks: GrammarChecks, compiler: Compiler) -> None:
        compiler.may_answer.set()
        for asker in (Asker("one"), Asker("one", "salt"), Asker("two", "salt"), ANYBODY) * 2:
            assert await told(checks, asker) == expected

    assert checked(work).asked == [text] * 4


def test_two_that_ask_the_same_at_once_are_answered_together() -> None:
    async def work(checks: GrammarChecks, compiler: Compiler) -> None:
        tasks = [asyncio.create_task(checks.checked(regex("a"), ANYBODY)) for _ in range(3)]
        await until(lambda: checks.num_waiting == 2)
        compiler.may_answer.set()
        await asyncio.gather(*tasks)

    assert checked(work).asked == ["a"]


def test_closing_ends_the_grammar_that_is_compiled_and_fails_those_that_wait() -> None:
    async def closed_while_asked(checks: GrammarChecks) -> list[object]:
        await checks.checked(regex("a"), ANYBODY)
        bombs = [GrammarSource("f", "json", json.dumps(BOMB | {"minLength": n})) for n in range(3)]
        asked = [asyncio.create_task(checks.checked(bomb, ANYBODY)) for bomb in bombs]
        await until(lambda: checks.num_waiting == 2)
        checks.close()
        async with asyncio.timeout(20):
            return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(closed_while_asked(GrammarChecks(GrammarProcess(VOCABULARY))))
    assert [type(answer) for answer in answers] == [CellError] * 3


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    process = GrammarProcess(VOCABULARY)
    yield process
    process.close()
    process.forget()


def test_a_grammar_that_is_given_up_costs_neither_its_time_nor_the_process(
    process: GrammarProcess,
) -> None:
    assert process.ask(GrammarQuestion(0, "regex", "a")).grammar is not None
    pid = process.pid
    process.give_up(0)  # too late, and of no effect
    process.give_up(1)
    with pytest.raises(CellError, match="ended with -9"):
        process.ask(GrammarQuestion(1, "json", json.dumps(BOMB)))
    assert process.ask(GrammarQuestion(2, "regex", "b")).grammar is not None
    assert process.ask(GrammarQuestion(3, "json", json.dumps(BOMB))).took_too_long
    assert process.ask(GrammarQuestion(4, "regex", "([")).error is not None
    assert process.pid == pid


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "a{1000000}", ""),  # too many expressions, or too long
        (
            "json",
            json.dumps(
                {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(513)}}
            ),
            "max is 2000",
        ),
    ],
)
def test_a_grammar_that_comes_to_its_limits_with_the_first_tokens_is_refused(
    kind: GrammarKind, source: str, words: str, process: GrammarProcess
) -> None:
    answer = process.ask(GrammarQuestion(0, kind, source))
    assert answer.grammar is None
    assert words in str(answer.error)
