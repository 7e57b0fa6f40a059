"""The admin port asks for keys of its own once there are some; without, to be called by its address."""

from collections.abc import Iterator

import httpx
import pytest

from router_service.api_keys import parse_api_keys
from router_service.local_names import is_local_name
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import assert_serves, running_server

API_KEY, ADMIN_KEY = {"x-api-key": "one"}, {"authorization": "Bearer two"}
COMMANDS = [
    ("GET", "/admin/status", None),
    ("POST", "/admin/evict", {"part": "kv"}),
    ("POST", "/admin/features", {}),
    ("POST", "/admin/weights", {"model_dir": "elsewhere", "running": "abort"}),
    ("GET", "/no-such-path", None),
]


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of the API and of the admin port."""
    with (
        ScriptedEngine() as engine,
        running_server(
            engine,
            api_keys=parse_api_keys("one", "keys"),
            admin_keys=parse_api_keys("operator two", "keys"),
        ) as (api, bound),
        httpx.Client(base_url=f"http://127.0.0.1:{bound.admin_port}", timeout=30) as admin,
    ):
        yield api, admin


@pytest.mark.parametrize("headers", [{}, API_KEY, {"x-api-key": "tw"}, {"authorization": "two"}])
@pytest.mark.parametrize(("method", "path", "body"), COMMANDS)
def test_without_an_admin_key_nothing_is_answered(
    ports: tuple[httpx.Client, httpx.Client],
    headers: dict[str, str],
    method: str,
    path: str,
    body: dict[str, str] | None,
) -> None:
    answer = ports[1].request(method, path, json=body, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["message"] == (
        "wrong or missing admin key; send Authorization: Bearer KEY, or x-api-key: KEY"
    )


def test_with_one_the_port_does_what_it_is_told(ports: tuple[httpx.Client, httpx.Client]) -> None:
    api, admin = ports
    assert admin.get("/admin/status", headers=ADMIN_KEY).status_code == 200
    evicted = admin.post("/admin/evict", json={"part": "kv"}, headers=ADMIN_KEY)
    assert evicted.json()["nodes"] == 3
    api.headers.update(API_KEY)
    assert_serves(api)
    assert api.post("/v1/completions", json={}, headers=ADMIN_KEY).status_code == 401


@pytest.fixture(scope="module")
def without_keys() -> Iterator[httpx.Client]:
    with (
        ScriptedEngine() as engine,
        running_server(engine) as (_, bound),
        httpx.Client(base_url=f"http://127.0.0.1:{bound.admin_port}", timeout=30) as admin,
    ):
        yield admin


@pytest.mark.parametrize("host", ["page.example", "page.example:8001", "localhost.example", ""])
def test_without_keys_a_name_that_a_page_could_have_is_refused(
    without_keys: httpx.Client, host: str
) -> None:
    answer = without_keys.get("/admin/status", headers={"host": host})
    assert answer.status_code == 400
    assert "asked by its address or as localhost" in answer.json()["error"]["message"]


def test_with_keys_any_name_will_do(ports: tuple[httpx.Client, httpx.Client]) -> None:
    answer = ports[1].get("/admin/status", headers=ADMIN_KEY | {"host": "admin.example"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8001", "localhost", "LocalHost:1", "[::1]:8001", "[::1]"]
)
def test_an_address_and_localhost_are_local_names(host: str) -> None:
    assert is_local_name(host)
