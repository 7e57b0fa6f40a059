from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import running_server, tokens


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    """Says "one two three …" to everybody. Shared: tests that change it bring their own."""
    with ScriptedEngine(token_ids=tokens(" one two three four five six seven eight")) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with running_server(engine) as (client, _):
        yield client
