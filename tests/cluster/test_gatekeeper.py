"""Who may come to a bound socket, over real sockets: peers with a listed key, and what is left of those without."""

import logging
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from cluster.channel import DealerSocket, PullSocket, PushSocket, RouterSocket
from cluster.channel_keys import CellKeys, KeyPair, PeerKeys
from cluster.errors import ConfigError
from cluster.gatekeeper import Gatekeeper
from tests.helpers.served import eventually

HOST = "127.0.0.1"
KEYS, OTHER_CELL = CellKeys.make(), CellKeys.make()
SECONDS = 10.0
MAX_FRAME_BYTES = 2**16


@dataclass
class Guarded:
    """A worker socket with its door."""

    socket: RouterSocket
    endpoint: str
    refusals: "Counter[str]"

    def expect_refusals(self, reason: str, count: int) -> None:
        eventually(lambda: self.refusals[reason] >= count, SECONDS, f"{count} refusals: {reason}")


@contextmanager
def guarded() -> Iterator[Guarded]:
    refusals: Counter[str] = Counter()
    with (
        Gatekeeper(lambda reason: refusals.update([reason])) as gatekeeper,
        RouterSocket(gatekeeper.door("workers", KEYS.engine.workers), MAX_FRAME_BYTES) as router,
    ):
        yield Guarded(router, router.bind(HOST), refusals)


def assert_serves(guarded: Guarded) -> None:
    with DealerSocket("rank-0", KEYS.worker) as worker:
        worker.connect(guarded.endpoint)
        worker.send(b"ready")
        assert guarded.socket.receive(SECONDS) == (b"rank-0", b"ready")
        guarded.socket.send(b"rank-0", b"step")
        assert worker.receive(SECONDS) == b"step"


def test_a_listed_key_enters_and_frames_go_both_ways() -> None:
    with guarded() as door:
        assert_serves(door)
    assert not door.refusals


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        pytest.param(PeerKeys(KeyPair.make(), KEYS.worker.server), "key", id="a key of its own"),
        pytest.param(
            PeerKeys(KEYS.http_server.pair, KEYS.worker.server), "key", id="an HTTP server's key"
        ),
        pytest.param(OTHER_CELL.worker, "handshake", id="another cell's keys"),
        pytest.param(
            PeerKeys(KEYS.worker.pair, KEYS.http_server.server),
            "handshake",
            id="another door's key",
        ),
        pytest.param(None, "handshake", id="no keys"),
    ],
)
def test_a_peer_without_a_listed_key_is_not_heard_hears_nothing_and_takes_nobodys_name(
    keys: PeerKeys | None, reason: str
) -> None:
    with guarded() as door, DealerSocket("rank-0", KEYS.worker) as worker:
        worker.connect(door.endpoint)
        worker.send(b"ready")
        assert door.socket.receive(SECONDS) == (b"rank-0", b"ready")
        with DealerSocket("rank-0", keys) as intruder:
            intruder.connect(door.endpoint)
            intruder.send(b"I am rank 0")
            door.expect_refusals(reason, 1)
            door.socket.send(b"rank-0", b"step")
            assert worker.receive(SECONDS) == b"step"
            assert intruder.receive(0.1) is None
        assert door.socket.receive(0.0) is None


def test_a_peer_that_expects_another_server_tells_it_nothing() -> None:
    """As when a stranger has bound the port of an engine that is gone."""
    with guarded() as door, DealerSocket("rank-0", OTHER_CELL.worker) as worker:
        worker.connect(door.endpoint)
        worker.send(b"secret")
        door.expect_refusals("handshake", 1)
        assert door.socket.receive(0.1) is None


def test_one_way_frames_need_a_listed_key_too() -> None:
    with (
        Gatekeeper() as gatekeeper,
        PullSocket(gatekeeper.door("routes", KEYS.engine.workers)) as pull,
        PushSocket(OTHER_CELL.worker) as intruder,
        PushSocket(KEYS.worker) as worker,
    ):
        endpoint = pull.bind(HOST)
        for socket_, frame in ((intruder, b"false routes"), (worker, b"routes")):
            socket_.connect(endpoint)
            socket_.send(frame)
        assert pull.receive(SECONDS) == b"routes"
        assert pull.receive(0.1) is None


def test_what_crosses_cannot_be_read_on_the_way() -> None:
    """A relay between the two sees every byte."""
    secret = b"the tokens of a prompt " * 20
    with (
        guarded() as door,
        relay(door.endpoint) as (endpoint, seen),
        DealerSocket("rank-0", KEYS.worker) as worker,
    ):
        worker.connect(endpoint)
        worker.send(secret)
        assert door.socket.receive(SECONDS) == (b"rank-0", secret)
        door.socket.send(b"rank-0", secret)
        assert worker.receive(SECONDS) == secret
    assert len(seen) > 2 * len(secret)
    assert secret[:23] not in bytes(seen)


def test_a_frame_that_is_sent_once_more_by_the_network_is_not_taken_twice() -> None:
    frame = b"x" * 5000
    with (
        guarded() as door,
        relay(door.endpoint, repeats=True) as (endpoint, _),
        DealerSocket("rank-0", KEYS.worker) as worker,
    ):
        worker.connect(endpoint)
        worker.send(frame)
        assert door.socket.receive(SECONDS) == (b"rank-0", frame)
        assert door.socket.receive(0.3) is None


def test_a_frame_above_the_bound_costs_its_sender_the_connection_and_nobody_else() -> None:
    with guarded() as door, DealerSocket("rank-1", KEYS.worker) as worker:
        worker.connect(door.endpoint)
        worker.send(b"x" * (2 * MAX_FRAME_BYTES))
        assert door.socket.receive(0.2) is None
        assert_serves(door)


def test_a_flood_of_strangers_is_turned_away_while_a_peer_is_served() -> None:
    with guarded() as door:
        host, port = door.endpoint.removeprefix("tcp://").split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(200)]
        noise = threading.Thread(target=make_noise, args=(host, int(port), 300))
        noise.start()
        try:
            for _ in range(5):
                assert_serves(door)
        finally:
            noise.join()
            for connection in silent:
                connection.close()
        door.expect_refusals("handshake", 200)
        assert_serves(door)


def test_refusals_make_a_line_at_the_first_and_at_each_power_of_ten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="pointsman.channel"), guarded() as door:
        host, port = door.endpoint.removeprefix("tcp://").split(":")
        make_noise(host, int(port), 30)
        door.expect_refusals("handshake", 24)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split("count=")[1] for line in lines] == ["1", "10"]
    assert all(f"reason=handshake endpoint={door.endpoint}" in line for line in lines)


def test_keys_are_shown_by_no_repr() -> None:
    shown = repr(KEYS)
    pairs = [
        *(KEYS.engine.clients.pair, KEYS.engine.workers.pair),
        *(KEYS.launcher.pair, KEYS.http_server.pair, KEYS.worker.pair),
    ]
    assert not any(pair.secret.decode() in shown for pair in pairs)


def test_no_two_cells_or_roles_share_a_key() -> None:
    pairs = {
        pair.secret
        for keys in (KEYS, OTHER_CELL)
        for pair in (
            *(keys.engine.clients.pair, keys.engine.workers.pair),
            *(keys.launcher.pair, keys.http_server.pair, keys.worker.pair),
        )
    }
    assert len(pairs) == 10


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_without_keys_nothing_leaves_loopback(host: str) -> None:
    with RouterSocket() as router, pytest.raises(ConfigError, match="without keys stays on loopb"):
        router.bind(host)
    with PullSocket() as pull, pytest.raises(ConfigError, match="without keys stays on loopback"):
        pull.bind(host)
    with DealerSocket("rank-0") as dealer, pytest.raises(ConfigError, match="without keys stays"):
        dealer.connect(f"tcp://{host}:5555")


# --- helpers


def make_noise(host: str, port: int, count: int) -> None:
    """Connections that say something else than a handshake, or a wrong one, and hang up."""
    for number in range(count):
        with socket.create_connection((host, port)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" if number % 5 == 4 else b"\xff" * 64)


@contextmanager
def relay(endpoint: str, *, repeats: bool = False) -> Iterator[tuple[str, bytearray]]:
    """A way to `endpoint` for one connection, and all bytes that took it. repeats: what is large goes on twice."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    seen = bytearray()
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(SECONDS)

        def pump(source: socket.socket, target: socket.socket, copies: int) -> None:
            try:
                while data := source.recv(2**16):
                    seen.extend(data)
                    target.sendall(data * (copies if len(data) > 4000 else 1))
            except OSError:
                pass  # the other end hung up
            finally:
                for end in (source, target):
                    try:
                        end.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue  # it is closed already

        def run() -> None:
            inside, _ = server.accept()
            with inside, socket.create_connection((host, int(port))) as outside:
                back = threading.Thread(target=pump, args=(outside, inside, 1))
                back.start()
                pump(inside, outside, 2 if repeats else 1)
                back.join()

        thread = threading.Thread(target=run)
        thread.start()
        yield f"tcp://{HOST}:{server.getsockname()[1]}", seen
        thread.join(SECONDS)
        assert not thread.is_alive()
