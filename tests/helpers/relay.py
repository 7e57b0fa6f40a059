"""A TCP port before an engine: connections through it are cut, and led to the same engine or to another one."""

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self

PATIENCE = 10.0


class Relay:
    """Serves on a thread of its own. What it relays stays encrypted."""

    def __init__(self, target: str) -> None:
        """target: an endpoint"""
        self._target: str | None = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay")
        self._connections: set[asyncio.Task[None]] = set()
        self._num_led = 0
        self.endpoint = ""

    def cut(self) -> None:
        """All connections; none is led anywhere until `lead_to`."""
        self._call(self._cut()).result(PATIENCE)

    def lead_to(self, target: str) -> None:
        self._target = target

    @property
    def num_led(self) -> int:
        """Connections that were led somewhere so far."""
        return self._num_led

    def __enter__(self) -> Self:
        self._thread.start()
        self.endpoint = self._call(self._serve()).result(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close()).result(PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    def _call(self, work: Any) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _serve(self) -> str:
        self._server = await asyncio.start_server(self._lead, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"tcp://{host}:{port}"

    async def _cut(self) -> None:
        self._target = None
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _close(self) -> None:
        self._server.close()
        await self._cut()

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if self._target is not None:
                self._num_led += 1
                await _join(reader, writer, self._target)
        except (OSError, asyncio.CancelledError):
            pass  # cut, or nobody is there
        finally:
            self._connections.discard(task)
            writer.transport.abort()


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str) -> None:
    """Until one side ends."""
    host, _, port = target.removeprefix("tcp://").rpartition(":")
    there = await asyncio.open_connection(host, int(port))
    ways = [
        asyncio.create_task(_copy(reader, there[1])),
        asyncio.create_task(_copy(there[0], writer)),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        there[1].transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
