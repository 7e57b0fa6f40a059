"""The connection to the engine: frames out, frames in, and word of its loss and return. asyncio, one socket.

ZeroMQ connects again by itself, also to another process that has the same endpoint and keys. What was sent into a lost
connection may have been read or not; who has something at stake has to say it again.
"""

import asyncio
from contextlib import suppress
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from cluster.channel import QUEUE_BOUND, know_server
from cluster.channel_keys import PeerKeys
from cluster.errors import CellError, PointsmanError
from cluster.messages import ToEngine, ToHttpServer
from cluster.wire import Decoder, encode

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class LinkUser(Protocol):
    """Called from the link's tasks, one call after the other."""

    def take(self, message: ToHttpServer) -> None: ...

    def lost(self) -> None:
        """Nothing sent from now on arrives before `back`. Frames of before may still be taken."""
        ...

    async def back(self) -> None: ...

    def fail(self, error: PointsmanError) -> None:
        """Nothing is read any more."""
        ...


class EngineLink:
    """Owner of the socket and of its monitor. `close` is the release of what the constructor and `start` acquire."""

    def __init__(self, endpoint: str, identity: str, keys: PeerKeys | None, user: LinkUser) -> None:
        """keys: None only where the engine is on this host and has none either."""
        self._endpoint = endpoint
        self._user = user
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        know_server(self._socket, keys, endpoint)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_BOUND)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_BOUND)
        self._decoder: Decoder[ToHttpServer] = Decoder(ToHttpServer)
        self._tasks: list[asyncio.Task[None]] = []
        self._monitor: zmq.asyncio.Socket | None = None
        self._is_connected = False
        self.is_lost = False
        """It was there, and is not."""
        self.last_frame_seconds = 0.0
        """Of the event loop's clock."""

    def start(self) -> None:
        """Connects; needs the running event loop."""
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(self._endpoint)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """Frames that are still queued get a moment to leave."""
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=500)
        self._context.term()

    async def send(self, message: ToEngine) -> None:
        """Completes at once: with DONTWAIT pyzmq never suspends, so this is safe while a task is being cancelled."""
        try:
            await self._socket.send(encode(message), zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise CellError(f"cannot send to the engine at {self._endpoint}: {error}") from error

    def note_sign_of_life(self) -> None:
        self.last_frame_seconds = asyncio.get_running_loop().time()

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._socket.recv()
                self.note_sign_of_life()
                self._user.take(self._decoder.decode(frame))
                await asyncio.sleep(0)  # receiving what is there gives way to nobody
        except (PointsmanError, zmq.ZMQError) as error:
            self._user.fail(
                CellError(f"the engine at {self._endpoint} cannot be understood: {error}")
            )

    async def _watch(self) -> None:
        assert self._monitor is not None
        while True:
            event = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                if self._is_connected:
                    self._is_connected, self.is_lost = False, True
                    self._user.lost()
                continue
            self._is_connected = True
            if self.is_lost:
                self.is_lost = False
                self.note_sign_of_life()
                await self._user.back()
