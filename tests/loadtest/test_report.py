import pytest

from loadtest.answer import TokenCounts
from loadtest.report import (
    FULL,
    RESULTS_BEGIN,
    RESULTS_END,
    TTFT,
    LatencyRow,
    LoadReport,
    from_json,
    to_json,
    to_markdown,
    with_results,
)

REPORT = LoadReport(
    host="http://127.0.0.1:8000",
    model="minnow",
    num_users=4,
    seconds=10.0,
    rows=[
        LatencyRow(FULL, "chat", 1200, 3, 850, 1100, 2300, 2345.6),
        LatencyRow(TTFT, "chat", 1197, 0, 41, 90, 180, 181.0),
    ],
    tokens={"chat": TokenCounts(100, 2000, 30, 400), "shared prefix": TokenCounts(5, 6, 7, 8)},
    errors={"the stream has no usage": 2, "status 503: loading": 1},
)


def test_a_report_survives_json() -> None:
    assert from_json(to_json(REPORT)) == REPORT


def test_the_tables_have_a_line_for_each_latency_and_each_user() -> None:
    assert to_markdown(REPORT).splitlines() == [
        "| user | latency | count | failed | p50 ms | p90 ms | p99 ms | max ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| chat | full | 1,200 | 3 | 850 | 1,100 | 2,300 | 2,346 |",
        "| chat | ttft | 1,197 | 0 | 41 | 90 | 180 | 181 |",
        "",
        "| user | prompt tokens | computed | cached | replayed | generated | generated/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| chat | 2,130 | 100 | 2,000 | 30 | 400 | 40.0 |",
        "| shared prefix | 18 | 5 | 6 | 7 | 8 | 0.8 |",
        "| all | 2,148 | 105 | 2,006 | 37 | 408 | 40.8 |",
        "",
        "- 1 × status 503: loading",
        "- 2 × the stream has no usage",
    ]


def test_results_replace_those_between_the_marks_only() -> None:
    document = f"before\n{RESULTS_BEGIN}\nold\n{RESULTS_END}\nafter\n"
    once = with_results(document, "new")
    assert once == f"before\n{RESULTS_BEGIN}\n\nnew\n\n{RESULTS_END}\nafter\n"
    assert with_results(once, "new") == once


@pytest.mark.parametrize("document", ["", RESULTS_BEGIN, RESULTS_END])
def test_a_document_without_marks_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match="no <!-- results -->"):
        with_results(document, "new")
