"""POST /admin/weights, and what becomes of answers under way, over HTTP before a real engine."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from cluster.namespace import weight_version
from router_service.http_server import BoundPorts
from tests.helpers.content_cell import ContentCell
from tests.helpers.content_workers import oracle
from tests.helpers.other_weights import fingerprint_of
from tests.helpers.scripted_engine import ScriptedEngine, wait_until
from tests.router_service.http.content_server import running_cell
from tests.router_service.http.helpers import (
    COMPLETIONS,
    MODEL,
    assert_error,
    running_server,
    tokens,
)

PROMPT = list(range(1, 14))
OTHER = "/other"
VERSION = weight_version(fingerprint_of(OTHER))
LONG = 100

Serving = tuple[httpx.Client, ContentCell, BoundPorts]


@pytest.fixture
def serving() -> Iterator[Serving]:
    with running_cell(num_ranks=1, max_num_seqs=4) as serving:
        yield serving


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    return asked | {"return_token_ids": True} | fields


def post_weights(ports: BoundPorts, asked: Any) -> httpx.Response:
    url = f"http://127.0.0.1:{ports.admin_port}/admin/weights"
    return httpx.post(url, json=asked, timeout=60)


def update(ports: BoundPorts, running: str = "restart", model_dir: str = OTHER) -> httpx.Response:
    return post_weights(ports, {"model_dir": model_dir, "running": running})


def held(
    serving: Serving, pool: ThreadPoolExecutor, asked: dict[str, Any], *, num_steps: int
) -> Future[httpx.Response]:
    """The answer of a request that hangs in the step after so many."""
    client, cell, _ = serving
    cell.ranks.hold_from = len(cell.ranks.content.steps) + num_steps
    answer = pool.submit(client.post, COMPLETIONS, json=asked)
    wait_until(lambda: len(cell.ranks.content.steps) == cell.ranks.hold_from)
    wait_until(lambda: cell.ranks.is_held)
    return answer


def update_held(
    serving: Serving, pool: ThreadPoolExecutor, running: str, **fields: Any
) -> httpx.Response:
    """The command reaches the engine in the step that hangs."""
    _, cell, ports = serving
    updating = pool.submit(update, ports, running)
    wait_until(lambda: cell.service.has_update)
    cell.ranks.release()
    return updating.result(30)


def tokens_of(answer: httpx.Response) -> list[list[int]]:
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def test_an_update_says_what_is_served_then_and_what_it_cost(serving: Serving) -> None:
    client, _, ports = serving
    client.post(COMPLETIONS, json=body(4))
    answer = update(ports)
    assert answer.status_code == 200
    told = answer.json()
    assert set(told) == {
        *("weight_version", "fingerprint", "seconds", "aborted", "restarted"),
        *("evicted_nodes", "evicted_bytes"),
    }
    assert (told["weight_version"], told["fingerprint"]) == (VERSION, fingerprint_of(OTHER))
    assert told["seconds"] >= 0
    after = client.post(COMPLETIONS, json=body(4)).json()
    assert after["weight_version"] == VERSION
    assert after["choices"][0]["token_ids"] == oracle(PROMPT, 4, OTHER.encode())[0]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert client.get(f"/v1/models/{MODEL}").json()["weight_version"] == VERSION


def test_an_answer_that_is_not_streamed_is_whole_and_of_the_other_weights(
    serving: Serving, pool: ThreadPoolExecutor
) -> None:
    answer = held(serving, pool, body(8), num_steps=4)
    told = update_held(serving, pool, "restart").json()
    assert (told["aborted"], told["restarted"]) == (0, 1)
    assert tokens_of(answer.result(30)) == [oracle(PROMPT, 8, OTHER.encode())[0]]
    assert answer.result().json()["weight_version"] == VERSION
    assert answer.result().json()["usage"]["completion_tokens"] == 8


def test_all_choices_of_an_answer_begin_again_the_ended_ones_too(
    serving: Serving, pool: ThreadPoolExecutor
) -> None:
    client, _, _ = serving
    (alone,) = tokens_of(client.post(COMPLETIONS, json=body(3, prompt=[9, 8, 7])))
    prompts = [[9, 8, 7], PROMPT]
    asked = body(LONG, prompt=prompts, stop_token_ids=alone[1:2], n=2)
    answer = held(serving, pool, asked, num_steps=8)
    told = update_held(serving, pool, "restart").json()
    assert told["restarted"] == 2
    other = tokens_of(answer.result(60))
    for prompt, choices in zip(prompts, (other[:2], other[2:]), strict=True):
        whole = oracle(prompt, LONG, OTHER.encode())[0]
        end = whole.index(alone[1]) + 1 if alone[1] in whole else LONG
        assert choices == [whole[:end]] * 2


def test_aborted_answers_are_a_503_that_says_why(
    serving: Serving, pool: ThreadPoolExecutor
) -> None:
    answer = held(serving, pool, body(8), num_steps=4)
    assert update_held(serving, pool, "abort").json()["aborted"] == 1
    refused = answer.result(30)
    assert_error(refused, 503, None)
    error = refused.json()["error"]
    assert error["code"] == "weights_changed"
    assert error["message"] == f"the weights were exchanged for {VERSION} while it ran"


def test_a_stream_that_has_shown_something_ends_with_the_error(
    serving: Serving, pool: ThreadPoolExecutor
) -> None:
    answer = held(serving, pool, body(40, stream=True), num_steps=12)
    assert update_held(serving, pool, "restart").json()["aborted"] == 1
    blocks = answer.result(30).text.strip().split("\n\n")
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks]
    assert chunks[-1]["error"]["code"] == "weights_changed"
    assert {chunk["weight_version"] for chunk in chunks[:-1]} == {"digests"}


def aborted(path: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the last event of its stream, whose weights were exchanged after some tokens."""
    with (
        ScriptedEngine(
            token_ids=tokens("one two three"), error_after=2, error_reason="abort"
        ) as engine,
        running_server(engine) as (client, _),
    ):
        answer = client.post(path, json={"model": MODEL, "stream": True} | asked)
    last: dict[str, Any] = json.loads(answer.text.strip().rpartition("data: ")[2])
    return last


def test_in_the_shape_of_responses_the_message_of_a_failed_one_begins_with_the_code() -> None:
    failed = aborted("/v1/responses", {"input": "x"})
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {
        "code": "server_error",
        "message": "weights_changed: the weights were exchanged for 89ab while it ran",
    }


@pytest.mark.parametrize("stream", [False, True])
def test_in_the_shape_of_messages_the_message_begins_with_the_code(stream: bool) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": stream}
    assert aborted("/v1/messages", asked) == {
        "type": "error",
        "error": {
            "type": "api_error",
            "message": "weights_changed: the weights were exchanged for 89ab while it ran",
        },
    }


def test_a_response_that_is_not_streamed_has_the_code() -> None:
    error = aborted("/v1/responses", {"input": "x", "stream": False})["error"]
    assert (error["code"], error["type"]) == ("weights_changed", "server_error")


def test_a_stream_that_has_shown_nothing_is_whole_and_of_the_other_weights(
    serving: Serving, pool: ThreadPoolExecutor
) -> None:
    prompt = PROMPT * 4  # computed in several steps
    answer = held(serving, pool, body(8, prompt=prompt, stream=True, echo=True), num_steps=1)
    assert update_held(serving, pool, "restart").json()["restarted"] == 1
    blocks = answer.result(30).text.strip().split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks]
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == oracle(prompt, 8, OTHER.encode())[0]
    assert {chunk["weight_version"] for chunk in chunks} == {VERSION}


def test_a_second_update_is_a_409_and_a_bad_directory_a_400_that_names_the_field(
    serving: Serving, pool: ThreadPoolExecutor
) -> None:
    client, cell, ports = serving
    cell.checkpoints.may_read.clear()
    first = pool.submit(update, ports)
    wait_until(lambda: cell.service.has_update)
    refused = update(ports)
    assert_error(refused, 409, None)
    assert refused.json()["error"]["code"] == "conflict"
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "unavailable")
    assert client.get("/health/live").status_code == 200
    cell.checkpoints.may_read.set()
    assert first.result(30).status_code == 200
    assert client.get("/health").status_code == 200
    assert_error(update(ports, model_dir="/bad"), 400, "model_dir")
    assert client.get(f"/v1/models/{MODEL}").json()["weight_version"] == VERSION
    metrics = client.get("/metrics").text
    assert 'pointsman_weight_updates_total{outcome="updated"} 1.0' in metrics
    assert 'pointsman_weight_updates_total{outcome="refused"} 1.0' in metrics


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"model_dir": "/x"}, "running"),
        ({"model_dir": "/x", "running": "finish"}, "running"),
        ({"running": "abort"}, "model_dir"),
        ({"model_dir": "", "running": "abort"}, "model_dir"),
        ({"model_dir": "/" * 5000, "running": "abort"}, "model_dir"),
        ({"model_dir": 7, "running": "abort"}, "model_dir"),
        ({"model_dir": "/x", "running": "abort", "force": True}, "force"),
    ],
)
def test_a_body_that_is_not_one_is_a_400_that_names_the_field(
    asked: dict[str, Any], field: str
) -> None:
    with ScriptedEngine() as engine, running_server(engine) as (_, ports):
        assert_error(post_weights(ports, asked), 400, field)
