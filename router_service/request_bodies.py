"""The body of a request, from the connection to a JSON object."""

import asyncio
from typing import Any

from fastapi import Request

from router_service.json_body import parse_json_object
from router_service.openai_errors import BodyTooLargeError
from router_service.streaming import ClientLeft

LARGE_BODY_BYTES = 2**18
"""Above this, parsing may take tens of milliseconds."""


class RequestBodies:
    """Owner of the one place at which a large body is parsed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._large_body = asyncio.Lock()

    async def json(self, request: Request) -> dict[str, Any]:
        """Large bodies one after the other on a thread: of what it does, only json.loads keeps others waiting.

        Raises RequestError, BodyTooLargeError, ClientLeft.
        """
        body = await read_body(request, self._max_bytes)
        if len(body) <= LARGE_BODY_BYTES:
            return parse_json_object(body)
        async with self._large_body:
            return await asyncio.to_thread(parse_json_object, body)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLargeError before more than `max_bytes` are held, ClientLeft."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is over the limit of {max_bytes} bytes (max_body_bytes)")
