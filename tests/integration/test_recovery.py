"""Ranks of a cell that serves are killed and frozen: streams go on as if nothing had been."""

import os
import signal

import pytest

from tests.helpers.served import Served, eventually
from tests.integration.api import CellApi
from tests.integration.open_requests import OpenRequests, StreamEnd, health

pytestmark = pytest.mark.ray
NUM_STREAMS = 4
NUM_TOKENS = 160
RECOVERY_SECONDS = 120.0
"""Far more than it takes: the machine may be busy."""


def test_streams_go_on_token_for_token_when_ranks_die_or_hang() -> None:
    arguments = "--ep-size", "2", "--deterministic", "--set", "cell.step_timeout_floor_seconds=2"
    with Served(*arguments) as served:
        served.wait_until_ready()
        undisturbed = _streams(served)
        for number, (rank, kind) in enumerate([(0, signal.SIGKILL), (1, signal.SIGSTOP)], start=1):
            with CellApi(served.base_url, served.admin_url) as api:
                api.evict("all")
            streams = OpenRequests(served, num_streams=NUM_STREAMS, max_tokens=NUM_TOKENS)
            os.kill(served.pid_of_rank(rank), kind)
            assert streams.stream_ends(RECOVERY_SECONDS) == undisturbed
            served.wait_for_stderr(f"recovered generation={number} ", 5.0)
        assert "rank lost rank=1 reason='it hung and was killed by this server" in served.stderr
        pid = served.pid_of_rank(0)
        os.kill(pid, signal.SIGKILL)  # with nothing to do
        served.wait_for_stderr("recovered generation=3 ", RECOVERY_SECONDS)
        eventually(lambda: health(served).status_code == 200, 5.0, "health")
        assert served.pid_of_rank(0) != pid
        assert _streams(served) == undisturbed
        with CellApi(served.base_url, served.admin_url) as api:
            values = api.metrics()
        assert values["pointsman_recovery_seconds_count", ()] == 3
        assert values["pointsman_recovered_tokens_total", ("replayed",)] > 0
        served.terminate()
        assert served.wait(30.0) == 0
        served.assert_nothing_left()


def _streams(served: Served) -> list[StreamEnd]:
    streams = OpenRequests(served, num_streams=NUM_STREAMS, max_tokens=NUM_TOKENS)
    ends = streams.stream_ends(RECOVERY_SECONDS)
    assert all(end.done and not end.errors and len(end.text) > 0 for end in ends)
    return ends
