"""ASGI middleware that lets a server end politely: what has begun is finished, what comes now is sent elsewhere."""

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import CellError
from router_service.error_shapes import error_answer
from router_service.openai_errors import json_response

_PASSED = frozenset({"/health/live", "/metrics", "/version"})
"""Answered to the end: they disturb nobody."""
_REASON = (
    "the server is draining: it finishes what has begun and takes nothing new; ask another one"
)


class Drain:
    """Owner of the number of open requests. Used from one event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_draining = False
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """From now on requests are refused with 503. Idempotent."""
        self._is_draining = True

    async def finished(self, seconds: float) -> bool:
        """Waits until no request is open, at most so long; whether none is."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_draining and scope["type"] == "http" and scope["path"] not in _PASSED:
            await self._refuse(scope, receive, send)
            return
        self._num_open += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            body = {"status": "draining", "reason": _REASON}
            answer = json_response(body, status=503, headers={"Retry-After": "1"})
        else:
            answer = error_answer(CellError(_REASON), scope["path"])
        answer.headers["connection"] = "close"
        await answer(scope, receive, send)
