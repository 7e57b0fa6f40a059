"""The body of a request, from the connection to a JSON object, within what all bodies together may take."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from router_service.json_body import parse_json_object
from router_service.openai_errors import BodyTooLargeError, BusyError
from router_service.streaming import ClientLeft

LARGE_BODY_BYTES = 2**18
"""Above this, parsing may take tens of milliseconds."""
UNCOUNTED_BYTES = 2**16
"""Of each body: so much waits in any connection before somebody looks at it. So who sends small bodies is never sent
away because others send large ones."""


@dataclass(frozen=True)
class BodyLimits:
    max_bytes: int
    """Of one body."""
    max_bytes_together: int
    """Of all bodies of this server that are read or turned into a request, each without its first UNCOUNTED_BYTES."""


class RequestBodies:
    """Owner of the one place at which a large body is parsed, and of the number of bytes that bodies hold."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._num_held_bytes = 0
        self._large_body = asyncio.Lock()

    @asynccontextmanager
    async def opened(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """The JSON object, whose bytes count as held until it is left: leave it when nothing but a request is made of
        it, and keep no reference.

        Large bodies are parsed one after the other on a thread: of what it does, only json.loads keeps others waiting.
        Raises RequestError, BodyTooLargeError, ClientLeft, BusyError when others hold too much.
        """
        limits, held = self._limits, _Held(self._hold)
        declared = _declared_bytes(request)
        if UNCOUNTED_BYTES < declared <= limits.max_bytes:
            self._check_room(declared - UNCOUNTED_BYTES)  # before any of it is sent for nothing
        try:
            yield await self._parse(await read_body(request, limits.max_bytes, held.grow))
        finally:
            held.release()

    async def _parse(self, body: bytes) -> dict[str, Any]:
        if len(body) <= LARGE_BODY_BYTES:
            return parse_json_object(body)
        async with self._large_body:
            return await asyncio.to_thread(parse_json_object, body)

    def _hold(self, num_bytes: int) -> None:
        """More than are held already; fewer where negative. Raises BusyError, and then holds no more."""
        if num_bytes > 0:
            self._check_room(num_bytes)
        self._num_held_bytes += num_bytes

    def _check_room(self, num_bytes: int) -> None:
        limit = self._limits.max_bytes_together
        if self._num_held_bytes + num_bytes > limit:
            raise BusyError(
                f"requests of other clients that have not begun yet hold {self._num_held_bytes} bytes, with this "
                f"body over the limit of {limit}; try again later, send fewer large bodies at once, or "
                "raise http.max_bodies_bytes"
            )


class _Held:
    """What one body holds."""

    def __init__(self, hold: Callable[[int], None]) -> None:
        self._hold = hold
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """To the size `num_bytes` of the body so far."""
        counted = max(0, num_bytes - UNCOUNTED_BYTES)
        self._hold(counted - self._num_bytes)
        self._num_bytes = counted

    def release(self) -> None:
        self._hold(-self._num_bytes)
        self._num_bytes = 0


def _hold_nothing(num_bytes: int) -> None:
    """Of one body that is small and alone."""


async def read_body(
    request: Request, max_bytes: int, grow: Callable[[int], None] = _hold_nothing
) -> bytes:
    """The whole body. Raises BodyTooLargeError before more than `max_bytes` are held, ClientLeft, and what `grow`
    raises, which is told the size after every piece."""
    if _declared_bytes(request) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        grow(len(body))
        if not message.get("more_body", False):
            return bytes(body)


def _declared_bytes(request: Request) -> int:
    """0 where nothing is declared."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is over the limit of {max_bytes} bytes (max_body_bytes)")
