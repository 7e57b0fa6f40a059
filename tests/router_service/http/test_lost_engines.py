"""Answers outlive their engine: clients read what they would have read, and the others are told to wait."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

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
    tokens,
)
from tests.router_service.http.lost_engine import LOST, CutServing, cut_serving, facts, has_told

TEXT = " one two three four five six seven eight"
NUM_TOKENS = len(tokens(TEXT))
SCRIPT: dict[str, Any] = {
    "token_ids": tokens(TEXT),
    "choice_answers": {1: tokens(" nine ten"), 2: tokens(" eleven")},
    "cached_tokens": 3,
    "replayed_tokens": 2,
    "step_seconds": 0.002,
}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (
        COMPLETIONS,
        completion_body(
            max_tokens=8,
            logprobs=2,
            echo=True,
            return_token_ids=True,
            return_routed_experts="weights",
        ),
    ),
    "choices": (COMPLETIONS, completion_body(max_tokens=7, n=3, stop=["even eleven"])),
    "chat": (CHAT, chat_body(max_tokens=8, logprobs=True, stop=["two three four"])),
    "response": ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 8}),
    "message": (
        "/v1/messages",
        {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]},
    ),
}


def engine(**changes: Any) -> ScriptedEngine:
    return ScriptedEngine(**(SCRIPT | changes))


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[httpx.Client]:
    """Of an engine that lives."""
    with engine() as whole, running_server(whole) as (client, _):
        yield client


@pytest.mark.parametrize(
    ("name", "num_told", "stream"),
    [
        ("completion", 3, False),
        ("completion", 5, True),
        ("choices", 2, False),
        ("chat", 3, True),
        ("response", 1, True),
        ("message", 0, True),
    ],
)
def test_an_answer_is_the_one_that_it_would_have_been(
    undisturbed: httpx.Client, name: str, num_told: int, stream: bool
) -> None:
    path, body = ASKED[name]
    body = body | {"stream": stream}
    num_requests = body.get("n", 1)
    with engine(stalls_after=num_told) as first, cut_serving(first.endpoint) as serving:
        answer = serving.post(path, body)
        serving.cut_when(has_told(first, num_told, num_requests))
        with engine() as second:
            serving.lead_to(second.endpoint)
            assert facts(answer.result(30)) == facts(undisturbed.post(path, json=body))
    assert len(second.submits) == num_requests
    for before, again in zip(first.submits, second.submits, strict=True):
        assert again.is_again
        told = again.output_token_ids
        assert num_told == (0 if told is None else len(told))
        assert again.sampling.seed == before.sampling.seed is not None
        assert again.score_prompt == (before.score_prompt and not num_told)
        assert (again.leader_id is None) == (before.leader_id is None)
        assert again.request_id != before.request_id


def test_an_engine_that_is_started_again_at_the_same_endpoint_is_found() -> None:
    body = completion_body(stream=True, max_tokens=NUM_TOKENS)
    with (
        engine(stalls_after=3) as first,
        running_server(first) as (client, _),
        client.stream("POST", COMPLETIONS, json=body) as answer,
    ):
        lines = answer.iter_lines()
        read = [next(lines), next(lines)]
        first.__exit__()
        with engine(at=first.endpoint) as second:
            read += list(lines)
            (submit,) = second.submits
    assert submit.is_again
    chunks = [json.loads(line[6:]) for line in read if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert read[-2:] == ["data: [DONE]", ""]


def test_a_choice_that_has_ended_is_not_asked_for_again(undisturbed: httpx.Client) -> None:
    body = completion_body(max_tokens=6, n=3, stop=["one"])
    with engine(stalls_after=4) as first, cut_serving(first.endpoint) as serving:
        answer = serving.post(COMPLETIONS, body)
        serving.cut_when(lambda: first.num_told == [4, 4])
        with engine() as second:
            serving.lead_to(second.endpoint)
            assert facts(answer.result(30)) == facts(undisturbed.post(COMPLETIONS, json=body))
    assert [(submit.choice, submit.leader_id) for submit in second.submits] == [
        (1, None),
        (2, None),
    ]


def test_a_connection_that_only_blinked_leaves_no_request_behind(
    undisturbed: httpx.Client,
) -> None:
    path, body = ASKED["chat"]
    with engine(stalls_after=3) as only, cut_serving(only.endpoint) as serving:
        answer = serving.post(path, body)
        serving.cut_when(has_told(only, 3))
        serving.lead_to(only.endpoint)
        wait_until(lambda: len(only.submits) == 2)
        only.stalls_after = None
        assert facts(answer.result(30)) == facts(undisturbed.post(path, json=body))
        assert only.aborts == [only.submits[0].request_id]
        assert only.num_active == 0


def test_others_are_told_to_come_again_while_the_engine_is_lost() -> None:
    with engine() as first, cut_serving(first.endpoint) as serving:
        client, admin = serving.client, serving.admin
        serving.cut()
        started = time.monotonic()
        for refused in (
            client.post(COMPLETIONS, json=completion_body()),
            client.post(CHAT, json=chat_body(stream=True)),
            client.get("/metrics"),
            admin.get("/admin/status"),
            admin.post("/admin/features", json={}),
            admin.post("/admin/evict", json={"part": "kv"}),
            admin.post("/admin/weights", json={"model_dir": "/other", "running": "abort"}),
        ):
            assert_error(refused, 503, None)
            assert LOST in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
        health = client.get("/health")
        assert (health.status_code, health.headers["retry-after"]) == (503, "1")
        assert LOST in health.json()["reason"]
        assert client.get("/health/live").status_code == 200
        assert client.get("/v1/models").status_code == 200
        assert time.monotonic() - started < 8, "some of them waited for the engine"
        with engine() as second:
            serving.lead_to(second.endpoint)
            assert_serves(client)
            assert client.get("/health").status_code == 200


def test_a_query_that_was_under_way_fails_when_the_engine_is_lost() -> None:
    with engine() as first, cut_serving(first.endpoint) as serving:
        body = {"model_dir": "/other", "running": "abort"}
        updating = serving.pool.submit(serving.admin.post, "/admin/weights", json=body)
        first.deaf = True
        asked = serving.pool.submit(serving.client.get, "/metrics")
        num_asked = first.num_status_queries
        probing = serving.pool.submit(serving.client.get, "/health")
        wait_until(lambda: first.num_status_queries > num_asked)
        serving.relay.cut()
        assert "lost before it answered" in probing.result(30).json()["reason"]
        for answer in (updating, asked):
            assert_error(answer.result(30), 503, None)
            assert "lost" in answer.result().json()["error"]["message"]


@pytest.mark.parametrize(("comes_back", "stream"), [(False, True), (True, False)])
def test_an_outage_that_is_too_long_ends_in_one_error(comes_back: bool, stream: bool) -> None:
    """Also with an engine that is there and does not become ready."""
    limit = {"outage_seconds": 0.5}
    with engine(stalls_after=2) as first, cut_serving(first.endpoint, **limit) as serving:
        answer = serving.post(COMPLETIONS, completion_body(stream=stream))
        serving.cut_when(has_told(first, 2))
        with engine(ready=False, held=True) as second:
            if comes_back:
                serving.lead_to(second.endpoint)
            assert_one_error(answer.result(30), "none went on within 0.5 s (--recovery-limit)")
            if comes_back:
                wait_until(lambda: second.submits[0].request_id in second.aborts)
                assert second.num_active == 0


def assert_one_error(answer: httpx.Response, why: str) -> None:
    if answer.headers["content-type"] == "application/json":
        assert answer.status_code == 503
        errors = [answer.json()]
    else:
        chunks = [line for line in answer.text.split("\n\n") if line not in ("", "data: [DONE]")]
        assert "error" in chunks[-1]
        errors = [json.loads(chunk[6:]) for chunk in chunks if "error" in chunk]
    (error,) = errors
    assert why in error["error"]["message"]


def test_without_patience_an_answer_ends_with_its_engine() -> None:
    limit = {"outage_seconds": 0.0}
    with engine(stalls_after=2) as first, cut_serving(first.endpoint, **limit) as serving:
        answer = serving.post(COMPLETIONS, completion_body(stream=True))
        serving.cut_when(has_told(first, 2))
        assert_one_error(answer.result(30), "the engine is lost")
        with engine() as second:
            serving.lead_to(second.endpoint)
            assert_serves(serving.client)
            assert len(second.submits) == 1


def test_what_was_there_whenever_an_engine_died_ends_with_the_third_and_others_go_on() -> None:
    with engine(stalls_after=2) as first, cut_serving(first.endpoint) as serving:
        suspect = serving.post(COMPLETIONS, completion_body(max_tokens=NUM_TOKENS))
        serving.cut_when(has_told(first, 2))
        with engine(stalls_after=3) as second, engine(stalls_after=4) as third:
            serving.lead_to(second.endpoint)
            wait_until(has_told(second, 3))
            other = serving.post(COMPLETIONS, completion_body(max_tokens=NUM_TOKENS))
            serving.cut_when(has_told(second, 3, 2))
            serving.lead_to(third.endpoint)
            serving.cut_when(has_told(third, 4, 2))
            with engine() as fourth:
                serving.lead_to(fourth.endpoint)
                assert other.result(30).json()["choices"][0]["text"] == TEXT
                assert_one_error(suspect.result(30), "3 engines were lost while they had this")
                assert len(fourth.submits) == 1


def left_stream(serving: CutServing, first: ScriptedEngine) -> None:
    """Its client goes while the engine is lost."""
    body = completion_body(stream=True, max_tokens=NUM_TOKENS)
    with serving.client.stream("POST", COMPLETIONS, json=body):
        serving.cut_when(has_told(first, 2))


@pytest.mark.parametrize("blinks", [False, True])
def test_who_left_meanwhile_is_not_asked_for_again(blinks: bool) -> None:
    with engine(stalls_after=2) as first, cut_serving(first.endpoint) as serving:
        left_stream(serving, first)
        with engine() as second:
            there = first if blinks else second
            first.stalls_after = None
            serving.lead_to(there.endpoint)
            assert_serves(serving.client)
            wait_until(lambda: there.num_active == 0)
            assert [submit.is_again for submit in there.submits] == [False] * (1 + blinks)
            assert there.aborts == [first.submits[0].request_id]


@pytest.mark.parametrize("kind", ["unavailable", "overloaded"])
def test_a_refusal_that_passes_is_waited_out_and_new_requests_are_told_of_it(
    undisturbed: httpx.Client, kind: str
) -> None:
    path, body = ASKED["chat"]
    with engine(stalls_after=2) as first, cut_serving(first.endpoint) as serving:
        answer = serving.post(path, body)
        serving.cut_when(has_told(first, 2))
        with engine(refuse_as=kind, ready=False) as second:
            serving.lead_to(second.endpoint)
            wait_until(lambda: len(second.submits) >= 2)
            refused = serving.client.post(COMPLETIONS, json=completion_body())
            assert refused.status_code == (503 if kind == "unavailable" else 429)
            second.refuse_as = None
            assert facts(answer.result(30)) == facts(undisturbed.post(path, json=body))
            assert len({submit.request_id for submit in second.submits}) == len(second.submits)


def test_a_refusal_for_good_is_shown() -> None:
    with engine(stalls_after=2) as first, cut_serving(first.endpoint) as serving:
        answer = serving.post(COMPLETIONS, completion_body())
        serving.cut_when(has_told(first, 2))
        with engine(refuse_as="invalid", refused_field="prompt") as second:
            serving.lead_to(second.endpoint)
            assert_error(answer.result(30), 400, "prompt")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_not_one_of_two_sets_of_weights(stream: bool) -> None:
    body = completion_body(max_tokens=8, stream=stream, return_token_ids=True)
    with engine(stalls_after=2) as first, cut_serving(first.endpoint) as serving:
        answer = serving.post(COMPLETIONS, body)
        serving.cut_when(has_told(first, 2))
        others = tokens(" eleven twelve")
        with engine(token_ids=others, weight_version="fedcba9876543210") as second:
            serving.lead_to(second.endpoint)
            if stream:
                assert_one_error(answer.result(30), "serves other weights: fedcba9876543210")
            else:
                told = answer.result(30).json()
                assert told["choices"][0]["token_ids"] == (others * 8)[:8]
                assert told["weight_version"] == "fedcba9876543210"
            wait_until(lambda: second.num_active == 0)
