"""A program that found a cell's ports and has no key: submits, reads, ends the cell, poses as rank and as launcher.

    python tests/integration/intruder.py HOST PORT…

On each port as three kinds of peer: without keys, with keys of its own, and as somebody who speaks no ZeroMQ. Prints
how many frames it was sent.
"""

import contextlib
import socket
import sys
import time

import numpy as np
import zmq

from cluster.messages import (
    EvictCommand,
    MetricsQuery,
    RankLost,
    Regroup,
    SamplingParams,
    StatusQuery,
    Stop,
    Submit,
    SubmitAll,
    Watching,
)
from cluster.wire import encode
from cluster.worker_messages import GroupBroken, WorkerFailed

LISTEN_SECONDS = 2.0
NAMES = ("rank-0.0", "launcher-1", "http-0")
ORDERS = [
    SubmitAll([Submit("s", np.array([1, 2], np.int32), SamplingParams(4, 0.0, 1.0, None, ()), None, False)]),
    *(StatusQuery(1), MetricsQuery(2), EvictCommand(3, "all")),
    *(RankLost(0, "says who"), WorkerFailed(0, 0, "says who"), GroupBroken(0, 0, "says who")),
    *(Watching(), Regroup(1, "127.0.0.1", 1, {0: 0, 1: 0}), Stop("says who")),
]  # fmt: skip


def main(host: str, ports: list[int]) -> None:
    context = zmq.Context()
    peers = [
        connect(context, f"tcp://{host}:{port}", kind, name, with_keys=with_keys)
        for port in ports
        for with_keys in (False, True)
        for kind, name in ((zmq.PUSH, ""), *((zmq.DEALER, name) for name in NAMES))
    ]
    for peer in peers:
        for order in ORDERS:
            peer.send(encode(order))
    for port in ports:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0) as stranger:
            stranger.sendall(b"POST /v1/completions HTTP/1.1\r\n\r\n" + bytes(4000))
    time.sleep(LISTEN_SECONDS)
    heard = [peer for peer in peers if peer.type == zmq.DEALER and peer.poll(0)]
    print(len(heard))
    context.destroy(linger=0)


def connect(
    context: "zmq.Context[zmq.Socket[bytes]]",
    endpoint: str,
    kind: int,
    name: str,
    *,
    with_keys: bool,
) -> "zmq.Socket[bytes]":
    peer = context.socket(kind)
    if name:
        peer.setsockopt(zmq.IDENTITY, name.encode())
    if with_keys:
        peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
        peer.curve_serverkey, _ = zmq.curve_keypair()
    peer.connect(endpoint)
    return peer


main(sys.argv[1], [int(port) for port in sys.argv[2:]])
