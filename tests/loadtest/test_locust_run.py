"""The locustfiles as locust runs them, in a process of its own, against a server whose answers are known."""

import json
from pathlib import Path

from loadtest.answer import TokenCounts
from loadtest.locust_run import run_locust
from loadtest.report import FULL, ITL, LATE, TTFT, LoadReport
from tests.loadtest.scripted_server import scripted_server

WHOLE = [
    b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"text": "b", "finish_reason": "length"}]}\n\ndata: {"choi',
    b'ces": [], "usage": {"prompt_tokens": 10, "completion_tokens": 2,',
    b'"prompt_tokens_details": {"cached_tokens": 5, "replayed_tokens": 3}}}\n\ndata: [DONE]\n\n',
]
BROKEN = [
    b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}\n\n',
    b'data: {"error": {"message": "rank 2 died"}}\n\n',
]


def counts(report: LoadReport) -> dict[tuple[str, str], tuple[int, int]]:
    """Events and failures by user and kind."""
    return {(row.user, row.kind): (row.count, row.failures) for row in report.rows}


def test_an_error_in_a_stream_is_a_failure_and_leaves_the_others_alone() -> None:
    with scripted_server({"/v1/chat/completions": BROKEN, "/v1/completions": WHOLE}) as url:
        report = run_locust(url, users=2, seconds=1)
    seen = counts(report)
    num_chats, num_failed_chats = seen["chat", FULL]
    assert num_chats == num_failed_chats == report.num_failures > 0
    assert report.errors == {"error in the stream: rank 2 died": num_chats}
    num_whole = seen["shared prefix", FULL][0]
    assert num_whole > 0
    assert seen == {
        ("chat", FULL): (num_chats, num_chats),
        ("shared prefix", FULL): (num_whole, 0),
        ("shared prefix", TTFT): (num_whole, 0),
        ("shared prefix", ITL): (num_whole, 0),
    }
    n = num_whole
    assert report.tokens == {"shared prefix": TokenCounts(2 * n, 5 * n, 3 * n, 2 * n)}
    assert report.model == "scripted"


def test_the_same_error_of_two_kinds_of_users_is_counted_for_both() -> None:
    broken = {"/v1/chat/completions": BROKEN, "/v1/completions": BROKEN}
    with scripted_server(broken) as url:
        report = run_locust(url, users=2, seconds=1)
    failures = {row.user: row.failures for row in report.rows if row.kind == FULL}
    assert min(failures["chat"], failures["shared prefix"]) > 0
    assert report.errors == {"error in the stream: rank 2 died": sum(failures.values())}


def test_a_trace_is_sent_row_by_row_as_it_is_due(tmp_path: Path) -> None:
    rows = [(0, 600, [1, 2]), (500, 100, [3]), (60_000, 100, [3]), (100, 512 * 300, [*range(300)])]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "\n".join(
            json.dumps({"timestamp": t, "input_length": n, "output_length": 64, "hash_ids": ids})
            for t, n, ids in rows
        )
    )
    with scripted_server({"/v1/completions": WHOLE}) as url:
        report = run_locust(
            url,
            users=3,
            seconds=2,
            locustfile="trace_locustfile.py",
            arguments=["--trace", str(trace)],
        )
    # one row is due after the end, one is longer than the context
    kinds = (FULL, TTFT, ITL, LATE)
    assert counts(report) == {("trace", kind): (2, 0) for kind in kinds}
