"""Locust users that send the requests of a trace when they are due, as far as there are enough users.

    locust -f loadtest/trace_locustfile.py --headless --host http://127.0.0.1:8000 --trace FILE \\
        --users 32 --spawn-rate 32 --run-time 1m --stop-timeout 60

A user takes the next row, waits until it is due, sends it and takes another, so `--users` bounds the requests in
flight. `late` is how long after its time a request was sent: when it grows, there are too few users or the server is
too slow. Rows that do not fit the context are left out; the run goes on until `--run-time`. Beside the arguments of
`locustfile.py` up to `--report-file`:

    --trace FILE              JSON lines in Mooncake's columns, perhaps gzipped
    --trace-block-tokens N    so many tokens stand for one block of the trace, of 512 (16)
    --trace-speed X           X times as fast as it was recorded (1.0)
    --vocab-size N            token ids are drawn below it (3000)
"""

import gzip
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from locust import events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser

from loadtest.report import LATE
from loadtest.streaming_user import StreamingUser
from loadtest.trace_replay import Arrival, TraceScale, arrivals, read_trace


@events.init_command_line_parser.add_listener
def _add_arguments(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("load: trace")
    group.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines, perhaps gzipped")
    group.add_argument(
        "--trace-block-tokens",
        type=int,
        default=16,
        metavar="N",
        help="so many tokens stand for one block of the trace, of 512 (default: 16)",
    )
    group.add_argument(
        "--trace-speed",
        type=float,
        default=1.0,
        metavar="X",
        help="X times as fast as it was recorded (default: 1.0)",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        default=3000,
        metavar="N",
        help="token ids are drawn below it (default: 3000)",
    )


@events.init.add_listener
def _prepare(environment: Environment, **_: object) -> None:
    """After the listener of `streaming_user`, which was added first."""
    load = StreamingUser.load
    options = load.options
    if options.trace is None:
        sys.exit("loadtest: say which trace with --trace FILE")
    try:
        scale = TraceScale(
            options.trace_block_tokens,
            vocab_size=options.vocab_size,
            context_tokens=load.context_tokens,
        )
        rows = tuple(read_trace(_lines(options.trace)))
    except (OSError, ValueError) as error:
        sys.exit(f"loadtest: {options.trace}: {error}")
    TraceUser.arrivals = arrivals(rows, scale, options.workload_seed, options.trace_speed)


@events.test_start.add_listener
def _start_the_clock(environment: Environment, **_: object) -> None:
    TraceUser.started = time.perf_counter()


def _lines(file: Path) -> list[str]:
    content = file.read_bytes()
    return (gzip.decompress(content) if file.suffix == ".gz" else content).decode().splitlines()


class TraceUser(StreamingUser):
    """Owner of the row that it sends next. All take theirs from one iterator, against one clock."""

    arrivals: ClassVar[Iterator[Arrival]]
    started: ClassVar[float]
    _next: Arrival | None = None

    def wait_time(self) -> float:
        """Takes a row: seconds until it is due."""
        self._next = next(self.arrivals, None)
        if self._next is None:
            raise StopUser
        return max(0.0, self._next.seconds - self._elapsed())

    def _elapsed(self) -> float:
        return time.perf_counter() - self.started

    @task
    def send(self) -> None:
        if self._next is None:  # the first call comes before the first wait
            return
        self.report(LATE, "trace", max(0.0, self._elapsed() - self._next.seconds))
        self.complete("trace", self._next.request)
