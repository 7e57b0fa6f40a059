"""ZeroMQ sockets with deadlines. Frames are opaque bytes here; `cluster/wire.py` gives them meaning.

An owner binds and tells its endpoint; peers connect with an identity. Every receive has a timeout, every queue a bound.
Each socket is used by one thread only.
"""

from types import TracebackType
from typing import Self

import zmq

from cluster.errors import CellError

QUEUE_BOUND = 65536
"""Frames that may wait in one direction of one socket."""


class _Socket:
    def __init__(self, kind: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, QUEUE_BOUND)
        self.socket.setsockopt(zmq.RCVHWM, QUEUE_BOUND)

    def bind(self, host: str) -> str:
        """Binds to a free port of `host` and returns the endpoint. The port is taken, never guessed."""
        return f"tcp://{host}:{self.socket.bind_to_random_port(f'tcp://{host}', max_tries=100)}"

    def connect(self, endpoint: str) -> None:
        self.socket.connect(endpoint)

    def close(self) -> None:
        self.socket.close(linger=0)

    def close_after_sending(self, seconds: float) -> None:
        """Closes, giving queued frames up to `seconds` to leave."""
        self.socket.close(linger=int(seconds * 1000))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RouterSocket(_Socket):
    """Talks to many named peers."""

    def __init__(self) -> None:
        super().__init__(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)

    def receive(self, timeout_seconds: float) -> tuple[bytes, bytes] | None:
        """(peer, frame), or None once the timeout has passed. Timeout 0 polls."""
        if not self.socket.poll(int(timeout_seconds * 1000), zmq.POLLIN):
            return None
        peer, *parts = self.socket.recv_multipart()
        return peer, b"".join(
            parts
        )  # a peer of this project sends one; the wire refuses what others send

    def send(self, peer: bytes, frame: bytes) -> None:
        """Raises CellError when the peer is not connected or its queue is full."""
        try:
            self.socket.send_multipart([peer, frame], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise CellError(f"cannot send to {peer.decode(errors='replace')}: {error}") from error


class DealerSocket(_Socket):
    """A named peer of one RouterSocket."""

    def __init__(self, identity: str) -> None:
        super().__init__(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())

    def receive(self, timeout_seconds: float | None) -> bytes | None:
        """One frame, or None once the timeout has passed. None waits without end: only where a parent process ends
        the waiting one (an idle cell must cost nothing)."""
        timeout = None if timeout_seconds is None else int(timeout_seconds * 1000)
        if not self.socket.poll(timeout, zmq.POLLIN):
            return None
        return self.socket.recv()

    def send(self, frame: bytes) -> None:
        try:
            self.socket.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise CellError(f"cannot send: {error}") from error


class PushSocket(_Socket):
    """One-way frames to a PullSocket, in order."""

    def __init__(self) -> None:
        super().__init__(zmq.PUSH)

    def send(self, frame: bytes) -> None:
        try:
            self.socket.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise CellError(f"cannot send: {error}") from error


class PullSocket(_Socket):
    def __init__(self) -> None:
        super().__init__(zmq.PULL)

    def receive(self, timeout_seconds: float) -> bytes | None:
        if not self.socket.poll(int(timeout_seconds * 1000), zmq.POLLIN):
            return None
        return self.socket.recv()
