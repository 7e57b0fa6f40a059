"""Who may connect to the sockets that a process binds: peers whose public key is listed, and nobody else.

CurveZMQ proves that a peer has its secret key and encrypts all that follows; libzmq then asks a handler inside the
process (ZAP, ZeroMQ RFC 27) whether the public key may enter. pyzmq's own handler is told of those only who come so
far. Who does not know the server's key fails before, which a socket's monitor tells; so both are listened to here.
"""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from cluster.channel_keys import ServerKeys
from cluster.log import logger

Refusal = Literal["key", "handshake"]
"""A key that is not listed; no proof of one, or another protocol."""
REFUSALS: tuple[Refusal, ...] = ("key", "handshake")

HANDSHAKE_MILLISECONDS = 10_000
"""After so long a connection that has proved nothing is closed."""
IO_THREADS = 2
"""They encrypt: a step of 50 KB for 16 ranks takes 1.2 ms instead of 1.5 ms with one."""
MAX_UNREAD_EVENTS = 100_000
"""Of a socket's monitor. A full one would hold its socket up."""

_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_CONTROL_ENDPOINT = "inproc://gatekeeper"
_STOP = b"stop"
_log = logger("channel")


class Gatekeeper:
    """Owner of a ZeroMQ context, whose sockets it guards, and of the thread that answers for it. `close` comes after
    the sockets are closed."""

    def __init__(self, on_refusal: Callable[[Refusal], None] | None = None) -> None:
        """on_refusal: called in the thread for every peer that is turned away."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(IO_THREADS)
        self._on_refusal = on_refusal
        self._peers: dict[bytes, frozenset[bytes]] = {}
        """Raw public keys by door."""
        self._num_refusals = dict.fromkeys(REFUSALS, 0)
        self._zap = self._socket(zmq.REP)
        self._zap.bind(_ZAP_ENDPOINT)
        self._control_end = self._socket(zmq.PAIR)
        self._control_end.bind(_CONTROL_ENDPOINT)
        self._control = self._socket(zmq.PAIR)
        self._control.connect(_CONTROL_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="gatekeeper", daemon=True)
        self._thread.start()

    def door(self, name: str, keys: ServerKeys) -> "Door":
        """For one socket. A name is given once."""
        assert name.encode() not in self._peers
        self._peers[name.encode()] = frozenset(z85.decode(key) for key in keys.peers)
        return Door(self, name, keys)

    def watch(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        endpoint = f"inproc://monitor-{name}"
        socket.monitor(endpoint, _FAILURES | zmq.EVENT_MONITOR_STOPPED)
        self._control.send(endpoint.encode())

    def close(self) -> None:
        """Waits for what closed sockets still send, at most as long as they were given."""
        self._control.send(_STOP)
        self._thread.join()
        self._control.close()
        self.context.term()

    def __enter__(self) -> "Gatekeeper":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._control_end, zmq.POLLIN)
        monitors: set[zmq.Socket[bytes]] = set()
        try:
            while True:
                ready = dict(poller.poll())
                if self._zap in ready:
                    self._answer(self._zap.recv_multipart())
                for monitor in monitors & ready.keys():
                    if self._read(monitor):
                        poller.unregister(monitor)
                        monitors.remove(monitor)
                        monitor.close()
                if self._control_end in ready:
                    command = self._control_end.recv()
                    if command == _STOP:
                        return
                    monitors.add(monitor := self._monitor(command.decode()))
                    poller.register(monitor, zmq.POLLIN)
        finally:
            for socket in (self._zap, self._control_end, *monitors):
                socket.close()

    def _answer(self, request: list[bytes]) -> None:
        """libzmq's question is version, id, domain, address, identity, mechanism and the key."""
        version, request_id, domain, address, _, mechanism, *credentials = request
        may_enter = mechanism == b"CURVE" and credentials[0] in self._peers.get(domain, ())
        if not may_enter:
            self._refuse("key", f"door={domain.decode()} address={address.decode()}")
        status = (b"200", b"OK") if may_enter else (b"400", b"this key is not listed")
        self._zap.send_multipart([version, request_id, *status, b"", b""])

    def _read(self, monitor: "zmq.Socket[bytes]") -> bool:
        """Everything that is there; True at its end."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(monitor, zmq.DONTWAIT)
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return True
                self._refuse("handshake", f"endpoint={event['endpoint'].decode()}")
        return False

    def _refuse(self, reason: Refusal, where: str) -> None:
        """One line for the first, the tenth, the hundredth …"""
        self._num_refusals[reason] += 1
        count = self._num_refusals[reason]
        if str(count).strip("0") == "1":
            _log.warning("peer refused reason=%s %s count=%d", reason, where, count)
        if self._on_refusal is not None:
            self._on_refusal(reason)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self.context.socket(kind)
        socket.linger = 0
        return socket

    def _monitor(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._socket(zmq.PAIR)
        socket.rcvhwm = MAX_UNREAD_EVENTS
        socket.connect(endpoint)
        return socket


@dataclass(frozen=True)
class Door:
    """What a bound socket needs so that only listed peers enter."""

    gatekeeper: Gatekeeper
    name: str
    keys: ServerKeys

    def guard(self, socket: "zmq.Socket[bytes]", max_frame_bytes: int) -> None:
        """Before it is bound. A peer whose frame is larger than `max_frame_bytes` loses its connection: before it has
        proved anything a peer can make this process hold that much and no more."""
        socket.curve_server = True
        socket.curve_publickey = self.keys.pair.public
        socket.curve_secretkey = self.keys.pair.secret
        socket.zap_domain = self.name.encode()
        socket.handshake_ivl = HANDSHAKE_MILLISECONDS
        socket.maxmsgsize = max_frame_bytes
        self.gatekeeper.watch(socket, self.name)
