"""One `pointsman serve` for all tests of a session that leave it as they find it."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.helpers.served import Served
from tests.integration.api import ALL_ON, CellApi

SHARED_CELL_FLAGS = ("--ep-size", "4", "--max-num-batched-tokens", "1024", "--deterministic")


@pytest.fixture(scope="session")
def shared_cell() -> Iterator[Served]:
    """Four ranks that answer the same whatever they compute beside it."""
    with Served(*SHARED_CELL_FLAGS) as served:
        served.wait_until_ready()
        yield served
        served.interrupt()
        assert served.wait(30.0) == 0
        served.assert_nothing_left()


@pytest.fixture
def api(shared_cell: Served) -> Iterator[CellApi]:
    with CellApi(shared_cell.base_url, shared_cell.admin_url) as api:
        yield api
        assert api.is_idle()


@pytest.fixture
def switching(api: CellApi) -> Iterator[CellApi]:
    """Leaves the cell with everything on."""
    assert api.features() == ALL_ON
    yield api
    assert api.features(**ALL_ON) == ALL_ON


@pytest.fixture
def openai(shared_cell: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{shared_cell.base_url}/v1", api_key="unused", max_retries=0) as client:
        yield client
