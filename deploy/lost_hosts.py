"""Connections of this process to hosts that are gone: no packet will ever end them, and whoever waits for one does so
until its own deadline (gloo: `cell.exchange_timeout_seconds`). So they are ended on this side."""

import contextlib
import os
import socket
from collections.abc import Collection

import psutil


def end_connections_to(addresses: Collection[str]) -> int:
    """Every TCP connection to one of these hosts reads as closed from now on, in whichever thread somebody waits.
    Returns how many there were."""
    ends = psutil.Process().net_connections("tcp")
    return sum(
        _end(end.fd, end.raddr.ip) for end in ends if end.raddr and end.raddr.ip in addresses
    )


def _end(descriptor: int, address: str) -> bool:
    """The descriptor may have been closed meanwhile, and given to something else."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
        if end.getpeername()[0] == address:
            end.shutdown(socket.SHUT_RDWR)
            return True
    return False
