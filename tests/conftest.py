"""The cell of sixteen ranks, for every test that wants one, and its place in a session: the end."""

from collections.abc import Iterator

import pytest

from tests.helpers.served import Served

START_SECONDS = 360.0
"""Longer than `cell.start_timeout_seconds`: a start that takes too long says what it waited for."""
STOP_SECONDS = 60.0
"""Eighteen actors, perhaps on few cores."""


@pytest.fixture(scope="session")
def sixteen_ranks() -> Iterator[Served]:
    """One `pointsman serve` for the session, started by the first test that wants it. A test brings prompts or a
    `cache_salt` of its own and leaves all features on.

    A replay waits for its plan however busy the machine is. The KV pools are small: sixteen of the default size are a
    gigabyte.
    """
    with Served(
        *("--ep-size", "16", "--deterministic"),
        *("--num-kv-blocks", "64", "--max-model-len", "1024"),
        *("--set", "scheduler.plan_wait_seconds=60"),
    ) as served:
        served.wait_until_ready(START_SECONDS)
        yield served
        served.interrupt()
        assert served.wait(STOP_SECONDS) == 0
        served.assert_nothing_left(STOP_SECONDS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--traces", metavar="DIR", help="folder of request traces: adds the tests that replay them"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """No other test runs beside sixteen ranks, idle or not. Without traces there is nothing to replay."""
    items.sort(
        key=lambda item: isinstance(item, pytest.Function) and "sixteen_ranks" in item.fixturenames
    )
    if config.getoption("--traces") is None:
        replays = [item for item in items if item.get_closest_marker("traces")]
        items[:] = [item for item in items if not item.get_closest_marker("traces")]
        config.hook.pytest_deselected(items=replays)
