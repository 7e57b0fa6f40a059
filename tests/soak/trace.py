"""Requests of a trace and when they are due, without end: again and again, each time with other tokens."""

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadtest.trace_replay import TraceRow, TraceScale, arrivals, read_trace
from tests.prefix_store.traces import synthetic_rows
from tests.soak.asks import CONTEXT_TOKENS, Ask, ask_of

TRACE_FILE = "mooncake_conversation_00-20min.jsonl.gz"
SCALE = TraceScale(block_tokens=8, context_tokens=CONTEXT_TOKENS)


def rows_of(traces: Path | None, seed: int) -> list[TraceRow]:
    """Of the trace in this folder; without one seeded ones of the same columns. Raises OSError, ValueError."""
    if traces is not None:
        text = gzip.decompress((traces / TRACE_FILE).read_bytes()).decode()
        return list(read_trace(text.splitlines()))
    return [
        TraceRow(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)
        for row in synthetic_rows(seed)
    ]


def due_asks(rows: Sequence[TraceRow], seed: int, speed: float) -> Iterator[tuple[float, Ask]]:
    """Seconds from the start, and what is asked then. Never ends."""
    number, started, cycle = 0, 0.0, 0
    seconds_of_cycle = (rows[-1].arrival_seconds + 1.0) / speed
    while True:
        for arrival in arrivals(rows, SCALE, seed + cycle, speed):
            yield started + arrival.seconds, ask_of(seed, number, arrival.request)
            number += 1
        started += seconds_of_cycle
        cycle += 1
