"""JSON whose long texts are made while it is sent: no piece takes the event loop for longer than a fraction of a
millisecond, and never more than one of them is held."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.npy import NpyText
from router_service.streaming import ClientLeft, unless_client_leaves

PIECE_BYTES = 2**17
Part = bytes | NpyText


def json_parts(body: object) -> list[Part]:
    """`body` encoded, but for every NpyText in it: that stands where its characters belong, between quotes."""
    mark = secrets.token_hex(16)  # no text that a client could have sent
    texts: list[NpyText] = []

    def place(value: object) -> str:
        assert isinstance(value, NpyText), type(value)
        texts.append(value)
        return mark

    first, *others = msgspec.json.encode(body, enc_hook=place).split(mark.encode())
    parts: list[Part] = [first]
    for text, encoded in zip(texts, others, strict=True):
        parts += [text, encoded]
    return parts


def event_parts(body: object) -> list[Part]:
    """One server-sent event."""
    return [b"data: ", *json_parts(body), b"\n\n"]


def num_bytes(parts: Iterable[Part]) -> int:
    return sum(map(len, parts))


def in_pieces(parts: Iterable[Part]) -> Iterator[bytes]:
    """Their bytes. Short neighbours come together, long ones in several pieces."""
    short = bytearray()
    for part in parts:
        if isinstance(part, bytes) and len(short) + len(part) <= PIECE_BYTES:
            short += part
            continue
        if short:
            yield bytes(short)
            short.clear()
        yield from part.pieces() if isinstance(part, NpyText) else _cut(part)
    if short:
        yield bytes(short)


async def one_by_one(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Between two of them others get their turn, whether or not the client takes all that is sent at once."""
    is_first = True
    for piece in pieces:
        if not is_first:
            await asyncio.sleep(0)
        is_first = False
        yield piece


def _cut(text: bytes) -> Iterator[bytes]:
    for start in range(0, len(text), PIECE_BYTES):
        yield text[start : start + PIECE_BYTES]


class JsonAnswer(Response):
    """A whole answer, sent in pieces. A client that leaves ends it."""

    def __init__(self, parts: list[Part]) -> None:
        super().__init__(media_type="application/json")
        self._parts = parts
        self.headers["content-length"] = str(num_bytes(parts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._run(send))
        except ClientLeft:
            return

    async def _run(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        async for piece in one_by_one(in_pieces(self._parts)):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
