"""What a load run measured, as JSON and as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from loadtest.answer import TokenCounts

FULL, TTFT, ITL, LATE = "full", "ttft", "itl", "late"
"""Kinds of rows: whole requests, time to first token, inter-token latency, sent after it was due."""
RESULTS_BEGIN, RESULTS_END = "<!-- results -->", "<!-- end of results -->"
"""Marks in a document, which stay."""


@dataclass(frozen=True)
class LatencyRow:
    """One kind of latency of one kind of user, in milliseconds. Locust keeps them rounded: to 1 ms below 100 ms, to two
    digits above."""

    kind: str
    user: str
    count: int
    failures: int
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class LoadReport:
    """`tokens` by kind of user; `errors` are messages with their counts."""

    host: str
    model: str
    num_users: int
    seconds: float
    rows: Sequence[LatencyRow]
    tokens: Mapping[str, TokenCounts]
    errors: Mapping[str, int]

    @property
    def num_failures(self) -> int:
        return sum(row.failures for row in self.rows)

    @property
    def all_tokens(self) -> TokenCounts:
        return sum(self.tokens.values(), TokenCounts())


def to_json(report: LoadReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report)) + b"\n"


def from_json(text: bytes) -> LoadReport:
    """Raises msgspec.MsgspecError."""
    return msgspec.json.decode(text, type=LoadReport)


def to_markdown(report: LoadReport) -> str:
    """Latencies, then tokens, then what failed."""
    parts = [_latency_table(report), _token_table(report)]
    if report.errors:
        parts.append(_error_list(report))
    return "\n\n".join(parts) + "\n"


def _latency_table(report: LoadReport) -> str:
    header = [
        "| user | latency | count | failed | p50 ms | p90 ms | p99 ms | max ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join(header + [_latency_line(row) for row in report.rows])


def _latency_line(row: LatencyRow) -> str:
    latencies = (f"{value:,.0f}" for value in (row.p50, row.p90, row.p99, row.max))
    cells = (row.user, row.kind, f"{row.count:,}", str(row.failures), *latencies)
    return f"| {' | '.join(cells)} |"


def _token_table(report: LoadReport) -> str:
    header = [
        "| user | prompt tokens | computed | cached | replayed | generated | generated/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines = [_token_line(user, tokens, report) for user, tokens in sorted(report.tokens.items())]
    return "\n".join([*header, *lines, _token_line("all", report.all_tokens, report)])


def _token_line(user: str, tokens: TokenCounts, report: LoadReport) -> str:
    counts = (tokens.prompt, tokens.computed, tokens.cached, tokens.replayed, tokens.generated)
    rate = tokens.generated / report.seconds if report.seconds else 0.0
    return f"| {' | '.join([user, *(f'{count:,}' for count in counts), f'{rate:.1f}'])} |"


def _error_list(report: LoadReport) -> str:
    return "\n".join(f"- {count} × {message}" for message, count in sorted(report.errors.items()))


def with_results(document: str, results: str) -> str:
    """The document with other results between its two marks. Raises ValueError when it lacks them."""
    before, begin, rest = document.partition(RESULTS_BEGIN)
    _, end, after = rest.partition(RESULTS_END)
    if not begin or not end:
        raise ValueError(f"no {RESULTS_BEGIN} … {RESULTS_END} in the document")
    return f"{before}{begin}\n\n{results.strip()}\n\n{end}{after}"
