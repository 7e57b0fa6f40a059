"""Connections to a host that is gone are ended on this side. The hosts are addresses of loopback."""

import socket
import threading

from deploy.lost_hosts import end_connections_to

GONE, THERE = "127.0.3.1", "127.0.3.2"


def connected(address: str) -> tuple[socket.socket, socket.socket]:
    """This process's end and the other host's."""
    with socket.create_server((address, 0)) as server:
        mine = socket.create_connection(server.getsockname(), timeout=5.0)
        return mine, server.accept()[0]


def test_who_waits_for_a_host_that_is_gone_is_told_and_others_are_not() -> None:
    ours, gone = connected(GONE)
    other, there = connected(THERE)
    read: list[bytes] = []
    waiting = threading.Thread(target=lambda: read.append(ours.recv(1)))
    waiting.start()
    assert end_connections_to([GONE]) == 1
    waiting.join(5.0)
    assert read == [b""]
    there.sendall(b"x")
    assert other.recv(1) == b"x"
    for end in (ours, gone, other, there):
        end.close()


def test_without_a_connection_there_is_nothing_to_end() -> None:
    assert end_connections_to([GONE]) == 0
