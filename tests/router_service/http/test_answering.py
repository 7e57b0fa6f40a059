"""Where the parts of a streamed answer are written."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from router_service.answering import Answering
from router_service.choice_delta import ChoiceDelta
from router_service.logprobs import ScoredToken
from router_service.visits import Visit, Visits


class OneDelta:
    """A generator whose answer is one delta."""

    def __init__(self, delta: ChoiceDelta) -> None:
        self._delta = delta

    async def run(self, generation: Any, visit: Visit) -> AsyncGenerator[ChoiceDelta, None]:
        yield self._delta


class NotingForm:
    """Remembers on which threads it was asked to write."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def told(self, delta: ChoiceDelta) -> Iterator[bytes]:
        self.threads.append(threading.get_ident())
        yield b"first"
        yield b"second"

    def closing(self) -> bytes:
        return b"end"

    def failure(self, error: Exception) -> bytes:
        raise AssertionError(error)


async def streamed(delta: ChoiceDelta, form: NotingForm) -> bytes:
    """The body that a client gets."""
    generation: Any = SimpleNamespace(model="m", id="1", request=SimpleNamespace(stream=True))
    answering = Answering(OneDelta(delta))  # type: ignore[arg-type]
    body = bytearray()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request: Any = SimpleNamespace(scope=scope, receive=receive)
        answer = await answering.answer(request, generation, form)  # type: ignore[arg-type]
        await answer(scope, receive, send)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("nothing comes")

    async def send(message: Any) -> None:
        body.extend(message.get("body", b""))

    scope = {"type": "http", "path": "/", "headers": [], "method": "POST"}
    await Visits(app, logs_access=False)(scope, receive, send)
    return bytes(body)


@pytest.mark.parametrize(("num_alternatives", "beside"), [(1, False), (20, True)])
def test_many_log_probs_of_one_delta_are_written_beside_the_event_loop(
    num_alternatives: int, beside: bool
) -> None:
    alternatives = tuple((token_id, -1.0) for token_id in range(num_alternatives))
    scored = [ScoredToken(5, 0, -1.0, alternatives)] * 200
    form = NotingForm()
    body = asyncio.run(streamed(ChoiceDelta(0, "x", [5], scored, "1", None), form))
    assert body == b"firstsecondend"
    assert [thread != threading.get_ident() for thread in form.threads] == [beside]
