"""ZeroMQ sockets with deadlines. Frames are opaque bytes here; `cluster/wire.py` gives them meaning.

An owner binds and tells its endpoint; peers connect with an identity. Every receive has a timeout, every queue a bound.
Each socket is used by one thread only. Frames are encrypted and both ends have proved who they are (`channel_keys`);
without keys a socket reaches no further than loopback.
"""

from ipaddress import ip_address
from types import TracebackType
from typing import Any, Self

import zmq
from zmq.error import ZMQBaseError

from cluster.channel_keys import PeerKeys
from cluster.errors import CellError, ConfigError
from cluster.gatekeeper import Door

QUEUE_BOUND = 65536
"""Frames that may wait in one direction of one socket."""
FREE_PORTS = range(61000, 65536)
"""Above those that Linux gives to connections: while an owner is away and peers try to come back, none of them is given
its port, and none connects to itself."""
SILENT_SECONDS = 30
"""A peer's host that acknowledges nothing for so long is gone: the connection ends, and what waited in it."""
MAX_FRAME_BYTES = 2**28
"""That a bound socket takes, unless its owner knows better."""


def know_server(socket: zmq.Socket[Any], keys: PeerKeys | None, endpoint: str) -> None:
    """Before a socket connects. Raises ConfigError where a socket without keys would leave this host."""
    if keys is None:
        _check_loopback(endpoint)
        return
    socket.curve_publickey = keys.pair.public
    socket.curve_secretkey = keys.pair.secret
    socket.curve_serverkey = keys.server


def _check_loopback(endpoint: str) -> None:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not ip_address(host).is_loopback:
        raise ConfigError(f"{endpoint}: a channel without keys stays on loopback")


def _bound_silence(socket: zmq.Socket[bytes]) -> None:
    """By the kernel: nothing wakes up for it. One for packets that are under way, one for connections at rest."""
    socket.setsockopt(zmq.TCP_MAXRT, SILENT_SECONDS * 1000)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, SILENT_SECONDS // 2)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, SILENT_SECONDS // 6)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


class _Socket:
    def __init__(self, kind: int, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.socket: zmq.Socket[bytes] = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, QUEUE_BOUND)
        self.socket.setsockopt(zmq.RCVHWM, QUEUE_BOUND)
        _bound_silence(self.socket)

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


class _BoundSocket(_Socket):
    def __init__(self, kind: int, door: Door | None, max_frame_bytes: int) -> None:
        self._door = door
        super().__init__(kind, zmq.Context.instance() if door is None else door.gatekeeper.context)
        if door is not None:
            door.guard(self.socket, max_frame_bytes)

    def bind(self, host: str, port: int = 0) -> str:
        """Binds to this port of `host`, or to a free one, and returns the endpoint. The port is taken, never guessed.

        Raises CellError where somebody else has it.
        """
        if self._door is None:
            _check_loopback(f"tcp://{host}:0")
        address = f"tcp://{host}"
        try:
            if not port:
                first, end = FREE_PORTS.start, FREE_PORTS.stop
                port = self.socket.bind_to_random_port(address, first, end, max_tries=100)
            else:
                self.socket.bind(f"{address}:{port}")
        except ZMQBaseError as error:
            raise CellError(f"{address}:{port or '*'} cannot be bound: {error}") from error
        return f"{address}:{port}"


class _ConnectedSocket(_Socket):
    def __init__(self, kind: int, keys: PeerKeys | None) -> None:
        super().__init__(kind, zmq.Context.instance())
        self._keys = keys

    def connect(self, endpoint: str) -> None:
        know_server(self.socket, self._keys, endpoint)
        self.socket.connect(endpoint)


class RouterSocket(_BoundSocket):
    """Talks to many named peers."""

    def __init__(self, door: Door | None = None, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        super().__init__(zmq.ROUTER, door, max_frame_bytes)
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


class DealerSocket(_ConnectedSocket):
    """A named peer of one RouterSocket."""

    def __init__(self, identity: str, keys: PeerKeys | None = None) -> None:
        super().__init__(zmq.DEALER, keys)
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


class PushSocket(_ConnectedSocket):
    """One-way frames to a PullSocket, in order."""

    def __init__(self, keys: PeerKeys | None = None) -> None:
        super().__init__(zmq.PUSH, keys)

    def send(self, frame: bytes) -> None:
        try:
            self.socket.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise CellError(f"cannot send: {error}") from error


class PullSocket(_BoundSocket):
    def __init__(self, door: Door | None = None, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        super().__init__(zmq.PULL, door, max_frame_bytes)

    def receive(self, timeout_seconds: float) -> bytes | None:
        if not self.socket.poll(int(timeout_seconds * 1000), zmq.POLLIN):
            return None
        return self.socket.recv()
