"""The load test against a real cell: nothing fails, and both sides count the same tokens."""

import pytest

from loadtest.locust_run import run_locust
from loadtest.own_server import token_counts
from loadtest.report import FULL, ITL, TTFT
from tests.integration.api import CellApi

pytestmark = pytest.mark.ray
USERS = ("chat", "shared prefix")


def test_a_short_load_run_has_no_failures_and_counts_the_servers_tokens(api: CellApi) -> None:
    before = token_counts(api.metrics_text())
    report = run_locust(
        api.base_url,
        users=4,
        seconds=3,
        arguments=["--prefix-tokens", "256", "--num-prefixes", "2"],
    )
    assert api.is_idle()
    assert report.errors == {}
    counts = {(row.user, row.kind): row.count for row in report.rows}
    assert set(counts) == {(user, kind) for user in USERS for kind in (FULL, TTFT, ITL)}
    assert all(counts[user, TTFT] == counts[user, FULL] > 0 for user in USERS)
    assert set(report.tokens) == set(USERS)
    assert before + report.all_tokens == token_counts(api.metrics_text())
    assert report.all_tokens.generated > 0
    assert report.tokens["shared prefix"].cached > 0
