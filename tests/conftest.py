"""What tests are collected and how, where a real Ray may start, and how many processes run tests side by side."""

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest

INTEGRATION = Path(__file__).parent / "integration"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--traces", metavar="DIR", help="folder of request traces: adds the tests that replay them"
    )


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for something, some of them for seconds."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, None, None]:
    """Modules and tests stay until the end: to look through them for garbage again and again took a quarter of the
    collection, and some of every later search."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make test` looks for tests with a real Ray in one folder. Without traces there is nothing to replay."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "ray" in marks and "slow" not in marks and not item.path.is_relative_to(INTEGRATION):
            raise pytest.UsageError(f"{item.nodeid} starts a real Ray: it belongs in {INTEGRATION}")
    if config.getoption("--traces") is None:
        replays = [item for item in items if item.get_closest_marker("traces")]
        items[:] = [item for item in items if not item.get_closest_marker("traces")]
        config.hook.pytest_deselected(items=replays)
