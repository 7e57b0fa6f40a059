"""Models, health, metrics, version, admin, keys, and everything that has no path."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from router_service.api_keys import parse_api_keys
from router_service.http_server import BoundPorts
from tests.helpers.scripted_engine import ScriptedEngine, wait_until
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    MODEL,
    assert_error,
    assert_serves,
    chat_body,
    completion_body,
    running_server,
)

NAMES = ["nope", "Demo", "demo ", "org/nope", 'quo"te', "new\nline", "ü", "x" * 10_000, ""]


def admin(ports: BoundPorts) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{ports.admin_port}", timeout=30)


def test_the_served_model_is_listed_and_retrievable(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == [MODEL]
    assert client.get(f"/v1/models/{MODEL}").json() == listed["data"][0]


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_model_is_not_found_on_both_endpoints(name: str, client: httpx.Client) -> None:
    for path, body in ((COMPLETIONS, completion_body()), (CHAT, chat_body())):
        response = client.post(path, json={**body, "model": name})
        assert_error(response, 404, "model")
        assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "name",
    [
        "nope",
        "org/nope",
        "a%20b",
        "%ff%fe",
        "x" * 10_000,
        f"{MODEL}%0a",
        "%0a",
        "a%0d%0ab",
        f"{MODEL}/",
        f"/{MODEL}",
    ],
)
def test_an_unknown_model_cannot_be_retrieved(name: str, client: httpx.Client) -> None:
    response = client.get(f"/v1/models/{name}")
    assert_error(response, 404, "model")
    assert response.json()["error"]["code"] == "model_not_found"


def test_a_model_name_with_a_slash_is_served() -> None:
    with (
        ScriptedEngine() as engine,
        running_server(engine, served_model_name="org/model") as (client, _),
    ):
        assert client.get("/v1/models/org/model").json()["id"] == "org/model"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("POST", "/openapi.json", 405),
        ("GET", "/v1", 404),
        ("POST", "/v1/nope", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/%ff%00%0a", 404),
        ("GET", "/admin/status", 404),
        ("GET", COMPLETIONS, 405),
        ("PUT", CHAT, 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models/demo", 405),
    ],
)
def test_unknown_paths_and_wrong_methods_are_json_errors(
    method: str, path: str, status: int, client: httpx.Client
) -> None:
    assert_error(client.request(method, path), status, None)
    assert_serves(client)


@pytest.mark.parametrize(
    "path", ["/v1/models", f"/v1/models/{MODEL}", "/health", "/health/live", "/metrics", "/version"]
)
def test_head_answers_what_get_does_but_the_body(path: str, client: httpx.Client) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-type", "content-length"):
        assert head.headers[name] == get.headers[name]
    assert client.head("/v1/models/nope").status_code == 404
    assert client.head(COMPLETIONS).status_code == 405


def test_health_is_ready_while_the_engine_says_so(client: httpx.Client) -> None:
    response = client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ready"})


def test_health_gives_the_engine_s_reason() -> None:
    with ScriptedEngine(ready=False) as engine, running_server(engine) as (client, _):
        response = client.get("/health")
        assert client.get("/health/live").status_code == 200
    assert response.status_code == 503
    assert response.json() == {"status": "unavailable", "reason": "rank 2 is lost"}


def test_a_silent_engine_is_not_ready_within_a_few_seconds_and_the_server_lives() -> None:
    with ScriptedEngine(deaf=True) as engine, running_server(engine) as (client, _):
        response = client.get("/health", timeout=5)
        assert client.get("/health/live").json() == {"status": "live"}
    assert response.status_code == 503
    assert "did not answer within 2 s" in response.json()["reason"]


def test_probes_at_once_share_one_query() -> None:
    with ScriptedEngine(deaf=True) as engine, running_server(engine) as (client, _):
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(client.get, "/health") for _ in range(8)]
            statuses = [answer.result().status_code for answer in answers]
        wait_until(lambda: engine.num_status_queries >= 1)
    assert statuses == [503] * 8
    assert engine.num_status_queries == 1


def test_metrics_are_the_engine_s_text(client: httpx.Client) -> None:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert response.text == "pointsman_steps_total 7\n"


def test_the_version_is_shown(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": "0.1.0"}


@pytest.mark.parametrize("part", ["kv", "routes", "all"])
def test_evict_answers_with_what_was_evicted(part: str) -> None:
    with (
        ScriptedEngine() as engine,
        running_server(engine) as (_, ports),
        admin(ports) as client,
    ):
        response = client.post("/admin/evict", json={"part": part})
    assert response.json() == {"part": part, "nodes": 3, "bytes": 4096, "kept_leased": 1}


def test_an_eviction_that_may_not_be_true_of_the_disk_is_an_error_that_says_so() -> None:
    with (
        ScriptedEngine(evict_failure="Read-only file system") as engine,
        running_server(engine) as (_, ports),
        admin(ports) as client,
    ):
        response = client.post("/admin/evict", json={"part": "all"})
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert "may still be in the state directory: Read-only file system" in message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "part"),
        ({"part": "plans"}, "part"),
        ({"part": "kv", "x": 1}, "x"),
        ({"part": 1}, "part"),
    ],
)
def test_evict_refuses_what_it_does_not_know(body: dict[str, Any], field: str) -> None:
    with (
        ScriptedEngine() as engine,
        running_server(engine) as (_, ports),
        admin(ports) as client,
    ):
        assert_error(client.post("/admin/evict", json=body), 400, field)
        assert_error(client.get("/admin/evict"), 405, None)
        assert_error(client.get("/v1/models"), 404, None)


def test_features_are_switched_one_by_one_and_answered_all() -> None:
    with (
        ScriptedEngine() as engine,
        running_server(engine) as (_, ports),
        admin(ports) as client,
    ):
        states = {"route_replay": True, "planned_dispatch": True, "prefix_store": True}
        assert client.post("/admin/features", json={}).json() == states
        for name in states:
            states = {**states, name: False}
            assert client.post("/admin/features", json={name: False}).json() == states
            assert client.get("/admin/status").json()["features"] == states
        back = {"prefix_store": True, "route_replay": True}
        assert client.post("/admin/features", json=back).json() == {**states, **back}
        nothing = {"planned_dispatch": None}
        assert client.post("/admin/features", json=nothing).json() == {**states, **back}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"rebalance": True}, "rebalance"),
        ({"prefix_store": False, "x": None}, "x"),
        ({"route_replay": 0}, "route_replay"),
        ({"route_replay": 1.0}, "route_replay"),
        ({"planned_dispatch": "off"}, "planned_dispatch"),
        ({"prefix_store": False, "planned_dispatch": []}, "planned_dispatch"),
        ({"prefix_store": {}}, "prefix_store"),
    ],
)
def test_features_refuse_what_they_do_not_know_and_switch_nothing(
    body: dict[str, Any], field: str
) -> None:
    with (
        ScriptedEngine() as engine,
        running_server(engine) as (_, ports),
        admin(ports) as client,
    ):
        assert_error(client.post("/admin/features", json=body), 400, field)
        states = client.post("/admin/features", json={}).json()
    assert set(states.values()) == {True}


def test_features_take_an_object_by_post_on_the_admin_port_only() -> None:
    with (
        ScriptedEngine() as engine,
        running_server(engine) as (public, ports),
        admin(ports) as client,
    ):
        assert_error(client.post("/admin/features", json=[]), 400, None)
        assert_error(client.post("/admin/features", content=b""), 400, None)
        assert_error(client.get("/admin/features"), 405, None)
        assert_error(public.post("/admin/features", json={}), 404, None)


def test_admin_status_shows_the_cell() -> None:
    with (
        ScriptedEngine() as engine,
        running_server(engine) as (_, ports),
        admin(ports) as client,
    ):
        status = client.get("/admin/status").json()
    assert (status["ready"], status["ep_size"], status["kv_blocks_free"]) == (True, 4, [8] * 4)
    assert status["ranks"] == [{"rank": r, "host": "127.0.0.1", "device": "cpu"} for r in range(4)]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "secret"},
        {"authorization": "Basic secret"},
        {"authorization": "Bearer secret2"},
        {"authorization": b"Bearer \xff\xfe"},
    ],
)
def test_with_a_key_the_api_is_closed_to_others(headers: dict[str, Any]) -> None:
    with (
        ScriptedEngine() as engine,
        running_server(engine, api_keys=parse_api_keys("secret", "keys")) as (client, _),
    ):
        answers = [
            client.post(COMPLETIONS, json=completion_body(), headers=headers),
            client.get("/v1/models", headers=headers),
        ]
        assert client.get("/health").status_code == 200
    for answer in answers:
        assert_error(answer, 401, None)
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_with_its_key_the_api_answers() -> None:
    with (
        ScriptedEngine() as engine,
        running_server(engine, api_keys=parse_api_keys("secret", "keys")) as (client, _),
    ):
        client.headers["authorization"] = "Bearer secret"
        assert_serves(client)


def test_strange_header_values_and_users_change_nothing(client: httpx.Client) -> None:
    for value in ("x" * 5000, "ü", "\U0001f642", 'a"b', "a\nb"):
        body = completion_body(max_tokens=1, user=value, cache_salt=value)
        headers = {"x-request-id": json.dumps(value).encode()}
        assert client.post(COMPLETIONS, json=body, headers=headers).status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_the_admin_port_takes_only_what_declares_itself_json(
    engine: ScriptedEngine, content_type: str
) -> None:
    with running_server(engine) as (client, ports), admin(ports) as operator:
        answer = operator.post(
            "/admin/evict", content=b'{"part":"kv"}', headers={"content-type": content_type}
        )
        assert_error(answer, 400, None)
        assert "application/json" in answer.json()["error"]["message"]
        assert_serves(client)


def test_an_unknown_field_of_any_length_is_named_shortly(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"z" * 1_000_000: 1})
    assert answer.status_code == 400
    assert len(answer.content) < 2000
