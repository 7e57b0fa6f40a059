"""`python -m tests.route_answers_table`: for how long an answer with routes holds up what else its HTTP server does.

The server is a process of its own, before an engine that has the routes of a DeepSeek-V3 ready. While one client is
given its answer, another asks `/health/live` again and again, which needs the event loop and nothing else.
"""

import argparse
import http.client
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from router_service.http_server import HttpServer
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import COMPLETIONS, completion_body, make_options

DIMS = (58, 8)
"""MoE layers and experts per token."""
PART_TOKENS = 400
"""About 1 MiB with weights, as an engine tells in one step."""
PROBE_PAUSE_SECONDS = 0.001
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Row:
    """One kind of answer. Waits are those of probes while it is given, in milliseconds; the median repeat of each."""

    name: str
    num_bytes: int
    seconds: float
    p50: float
    p99: float
    longest: float

    def __str__(self) -> str:
        return (
            f"| {self.name} | {self.num_bytes / 1e6:.1f} | {self.seconds:.2f} | {self.p50:.2f} | "
            f"{self.p99:.1f} | {self.longest:.1f} |"
        )


HEAD = (
    "| answer | MB | seconds | wait p50, ms | wait p99, ms | longest wait, ms |\n"
    "| --- | --- | --- | --- | --- | --- |"
)
ANSWERS: dict[str, dict[str, Any]] = {
    "no routes": {},
    "ids, whole": {"return_routed_experts": True},
    "ids and weights, whole": {"return_routed_experts": "weights"},
    "ids and weights, streamed": {"return_routed_experts": "weights", "stream": True},
    "ids and weights, n = 2, whole": {"return_routed_experts": "weights", "n": 2},
    "ids and weights, n = 2, streamed": {
        "return_routed_experts": "weights",
        "n": 2,
        "stream": True,
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.route_answers_table")
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    print(HEAD)
    with served(options.tokens) as port:
        for name, fields in ANSWERS.items():
            told = [measured(name, port, options.tokens, fields) for _ in range(options.repeats)]
            print(middle(told), flush=True)
    return 0


def middle(rows: list[Row]) -> Row:
    def of(field: str) -> float:
        return statistics.median(getattr(row, field) for row in rows)

    name, num_bytes = rows[0].name, rows[0].num_bytes
    return Row(name, num_bytes, of("seconds"), of("p50"), of("p99"), of("longest"))


def measured(name: str, port: int, num_tokens: int, fields: dict[str, Any]) -> Row:
    ours, theirs = _SPAWN.Pipe()
    asker = _SPAWN.Process(target=_ask, args=(port, num_tokens, fields, theirs))
    asker.start()
    assert ours.recv() == "asking"
    waits = []
    probe = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not ours.poll():
        assert asker.is_alive() or ours.poll(), "the answer is not as it should be"
        started = time.perf_counter()
        probe.request("GET", "/health/live")
        assert probe.getresponse().read()
        waits.append(1e3 * (time.perf_counter() - started))
        time.sleep(PROBE_PAUSE_SECONDS)
    num_bytes, seconds = ours.recv()
    probe.close()
    asker.join()
    p99 = sorted(waits)[int(0.99 * (len(waits) - 1))]
    return Row(name, num_bytes, seconds, statistics.median(waits), p99, max(waits))


def _ask(port: int, num_tokens: int, fields: dict[str, Any], pipe: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    body = completion_body(prompt=[70] * num_tokens, max_tokens=4, **fields)
    pipe.send("asking")
    started = time.perf_counter()
    connection.request("POST", COMPLETIONS, json.dumps(body))
    answer = connection.getresponse()
    assert answer.status == 200
    pipe.send((len(answer.read()), time.perf_counter() - started))


@contextmanager
def served(num_tokens: int) -> Iterator[int]:
    """The port of a server in a process of its own, and so its engine."""
    pipes, processes = [], []
    endpoint: str | None = None
    for run in (_run_engine, _run_server):
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=run, args=(num_tokens, endpoint, theirs))
        process.start()
        endpoint = ours.recv()
        pipes.append(ours)
        processes.append(process)
    try:
        yield int(endpoint or 0)
    finally:
        for pipe, process in zip(reversed(pipes), reversed(processes), strict=True):
            pipe.send("stop")
            process.join(30)


def _run_engine(_num_tokens: int, _endpoint: None, pipe: Any) -> None:
    with ScriptedEngine(route_dims=DIMS, route_part_tokens=PART_TOKENS) as engine:
        pipe.send(engine.endpoint)
        pipe.recv()


def _run_server(num_tokens: int, endpoint: str, pipe: Any) -> None:
    options = make_options(endpoint, max_model_len=num_tokens + 8, logs_access=False)
    server = HttpServer(options)
    pipe.send(str(server.start().port))
    pipe.recv()
    server.stop(5)


if __name__ == "__main__":
    sys.exit(main())
