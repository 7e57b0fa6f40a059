"""Server-sent events, and work that ends when its client leaves. No knowledge of the API's bodies."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import CellError, PointsmanError
from cluster.log import logger
from router_service.visits import visit_of

T = TypeVar("T")
_log = logger("http")

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientLeft(Exception):
    """The connection is gone; there is nobody to answer."""


def event(body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_event(name: str, body: object) -> bytes:
    """One server-sent event of a kind."""
    return b"event: " + name.encode() + b"\n" + event(body)


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client disconnects.

    The body must have been read before: every message but the disconnect is dropped. Raises ClientLeft, and whatever
    `work` raises.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        await _cancel(watch)
        await _cancel(task)


class EventStream(Response):
    """A stream. The 200 is sent with the first event, so that a failure before it is raised, for a plain error answer.

    A failure after it is one event with the error, and the stream closes without [DONE].
    """

    def __init__(
        self,
        events: Callable[[], AsyncGenerator[bytes, None]],
        failure: Callable[[Exception], bytes],
    ) -> None:
        """failure: the event that tells an error."""
        super().__init__()
        self._events = events
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._run(scope, receive, send))
        except ClientLeft:
            return

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self._events()) as events:
            try:
                async for body in events:
                    if not started:
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                        )
                        started = True
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except PointsmanError as error:
                if not started:
                    raise
                _log.warning(
                    "stream broke off request_id=%s reason=%s",
                    visit_of(scope).request_id,
                    _reason(error),
                )
                await send(_part(self._failure(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _part(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


def _reason(error: PointsmanError) -> str:
    """Errors of requests may quote them, those of cells do not."""
    return ascii(str(error)) if isinstance(error, CellError) else type(error).__name__


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: "asyncio.Task[Any]") -> None:
    """Waits until the task has let go of what it holds."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # seen: it was raised by task.result(), or nobody is left to hear it
