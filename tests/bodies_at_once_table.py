"""`python -m tests.bodies_at_once_table`: how far the process of an HTTP server grows when many clients send large
bodies at once, by the bound on what bodies hold together."""

import argparse
import json
import multiprocessing
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil

from router_service.http_server import HttpServer
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import completion_body, make_options

MIB = 2**20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
PIECE_BYTES = 2**18
PATIENCE = 120.0
_SPAWN = multiprocessing.get_context("spawn")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bodies_at_once_table")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--body-mib", type=int, default=30)
    parser.add_argument("--limits-mib", type=int, nargs="+", default=[64, 256, 2**20])
    options = parser.parse_args(arguments)
    body = json.dumps(completion_body(user="u" * (options.body_mib * MIB))).encode()
    print("| limit, MiB | grew by, MiB | answers by status |\n| --- | --- | --- |")
    for limit in options.limits_mib:
        grown, statuses = measured(body, options.clients, limit * MIB)
        told = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
        print(f"| {limit} | {grown / MIB:.0f} | {told} |", flush=True)
    return 0


def measured(body: bytes, num_clients: int, limit: int) -> tuple[int, Counter[str]]:
    with ScriptedEngine() as engine, served(engine.endpoint, limit) as (process, port):
        before = process.memory_info().rss
        with peak_bytes(process) as peak, ThreadPoolExecutor(num_clients) as pool:
            statuses = Counter(pool.map(lambda _: status_of(port, body), range(num_clients)))
        return peak[0] - before, statuses


def status_of(port: int, body: bytes) -> str:
    """Of the answer, or how the connection broke."""
    view = memoryview(body)
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
            connection.sendall(HEAD % len(body))
            for start in range(0, len(body), PIECE_BYTES):
                connection.sendall(view[start : start + PIECE_BYTES])
            return connection.recv(4096)[9:12].decode()
    except OSError as error:
        return type(error).__name__


@contextmanager
def peak_bytes(process: psutil.Process) -> Iterator[list[int]]:
    """One number, of the resident memory so far."""
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


@contextmanager
def served(endpoint: str, limit: int) -> Iterator[tuple[psutil.Process, int]]:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_run_server, args=(endpoint, limit, theirs))
    process.start()
    try:
        yield psutil.Process(process.pid), ours.recv()
    finally:
        ours.send("stop")
        process.join(30)


def _run_server(endpoint: str, limit: int, pipe: Any) -> None:
    options = make_options(
        endpoint, max_body_bytes=64 * MIB, max_bodies_bytes=limit, logs_access=False
    )
    server = HttpServer(options)
    pipe.send(server.start().port)
    pipe.recv()
    server.stop(5)


if __name__ == "__main__":
    sys.exit(main())
