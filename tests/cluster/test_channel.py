import pytest
import zmq

from cluster.channel import (
    FREE_PORTS,
    QUEUE_BOUND,
    SILENT_SECONDS,
    DealerSocket,
    PullSocket,
    PushSocket,
    RouterSocket,
)
from cluster.errors import CellError
from tests.helpers.scripted_engine import wait_until


def test_frames_reach_the_named_peer_and_come_back_in_order() -> None:
    with RouterSocket() as router, DealerSocket("rank-3") as dealer:
        dealer.connect(router.bind("127.0.0.1"))
        for number in range(3):
            dealer.send(bytes([number]))
        received = [router.receive(5.0) for _ in range(3)]
        assert received == [(b"rank-3", bytes([n])) for n in range(3)]
        router.send(b"rank-3", b"answer")
        assert dealer.receive(5.0) == b"answer"


def test_a_wait_ends_with_its_timeout() -> None:
    with RouterSocket() as router, PullSocket() as pull:
        router.bind("127.0.0.1")
        pull.bind("127.0.0.1")
        assert router.receive(0.01) is None
        assert pull.receive(0.01) is None


def test_sending_to_a_peer_that_never_connected_names_it() -> None:
    with RouterSocket() as router, pytest.raises(CellError, match="rank-9"):
        router.send(b"rank-9", b"x")


def test_pushed_frames_arrive_in_order() -> None:
    with PullSocket() as pull, PushSocket() as push:
        push.connect(pull.bind("127.0.0.1"))
        for number in range(5):
            push.send(bytes([number]))
        assert [pull.receive(5.0) for _ in range(5)] == [bytes([n]) for n in range(5)]


@pytest.mark.parametrize("kind", [RouterSocket, DealerSocket, PushSocket, PullSocket])
def test_a_connection_to_a_host_that_is_silent_ends_and_nothing_waits_for_it_without_bound(
    kind: type[RouterSocket | DealerSocket | PushSocket | PullSocket],
) -> None:
    end = kind("rank-3") if kind is DealerSocket else kind()
    with end:
        option = end.socket.getsockopt
        assert option(zmq.TCP_MAXRT) == 1000 * SILENT_SECONDS
        at_rest = option(zmq.TCP_KEEPALIVE_CNT) * option(zmq.TCP_KEEPALIVE_INTVL)
        assert option(zmq.TCP_KEEPALIVE) == 1
        assert option(zmq.TCP_KEEPALIVE_IDLE) + at_rest <= SILENT_SECONDS
        assert 0 < option(zmq.SNDHWM) <= QUEUE_BOUND


def takes(socket: RouterSocket, endpoint: str) -> bool:
    """A closed socket lets go of its port in a thread of ZeroMQ's."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        return socket.bind(host, int(port)) == endpoint
    except CellError:
        return False


def test_a_port_that_was_taken_is_taken_again_by_the_next_owner_and_by_nobody_beside_it() -> None:
    with RouterSocket() as first:
        endpoint = first.bind("127.0.0.1")
        port = int(endpoint.rpartition(":")[2])
        assert port in FREE_PORTS
        with (
            RouterSocket() as beside,
            pytest.raises(
                CellError, match=f"tcp://127.0.0.1:{port} cannot be bound: Address already"
            ),
        ):
            beside.bind("127.0.0.1", port)
        with DealerSocket("peer") as peer:
            peer.connect(endpoint)
            peer.send(b"to the first")
            assert first.receive(5.0) == (b"peer", b"to the first")
            first.close()
            with RouterSocket() as second:
                wait_until(lambda: takes(second, endpoint))
                peer.send(b"to the second")
                assert second.receive(5.0) == (b"peer", b"to the second")
