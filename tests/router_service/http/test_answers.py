"""Shapes of whole and streamed answers, routes, and what happens when the engine refuses or fails."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from tests.helpers.scripted_engine import ScriptedEngine, scripted_routes, wait_until
from tests.router_service.http.helpers import (
    CHAT,
    CODEC,
    COMPLETIONS,
    MODEL,
    assert_error,
    chat_body,
    completion_body,
    events,
    running_server,
    tokens,
)

ENDPOINTS = [(COMPLETIONS, completion_body), (CHAT, chat_body)]
TEXT = " one two three"


def load(encoded: str) -> np.ndarray:
    array: np.ndarray = np.load(io.BytesIO(base64.b64decode(encoded)))
    return array


def sdk(client: httpx.Client) -> OpenAI:
    return OpenAI(
        base_url=f"{client.base_url}/v1".replace("//v1", "/v1"), api_key="none", max_retries=0
    )


def test_the_sdk_reads_a_whole_completion(client: httpx.Client) -> None:
    with sdk(client) as openai:
        answer = openai.completions.create(model=MODEL, prompt="hello", max_tokens=3)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_the_sdk_reads_a_streamed_completion(client: httpx.Client) -> None:
    with sdk(client) as openai:
        stream = openai.completions.create(model=MODEL, prompt="hello", max_tokens=3, stream=True)
        choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.text for choice in choices) == TEXT
    assert choices[-1].finish_reason == "length"


def test_the_sdk_reads_a_whole_chat(client: httpx.Client) -> None:
    with sdk(client) as openai:
        answer = openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_completion_tokens=3
        )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"


def test_the_sdk_reads_a_streamed_chat_with_usage(client: httpx.Client) -> None:
    with sdk(client) as openai:
        stream = openai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


def test_a_chat_stream_starts_with_the_role_and_ends_with_the_finish_reason(
    client: httpx.Client,
) -> None:
    chunks = events(client.post(CHAT, json=chat_body(max_tokens=2, stream=True)))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
    assert choices[-1]["delta"] == {}
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
def test_token_ids_are_given_whole_and_in_pieces(
    path: str, make_body: Any, client: httpx.Client
) -> None:
    body = make_body(max_tokens=3, return_token_ids=True)
    whole = client.post(path, json=body).json()
    chunks = events(client.post(path, json={**body, "stream": True}))
    pieces = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert whole["choices"][0]["token_ids"] == pieces == tokens(TEXT)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


def test_token_ids_are_absent_unless_asked_for(client: httpx.Client) -> None:
    answer = client.post(COMPLETIONS, json=completion_body(max_tokens=1)).json()
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_routes_cover_all_tokens_that_were_an_input(stream: bool, client: httpx.Client) -> None:
    body = completion_body(
        prompt=[70] * 10, max_tokens=4, return_routed_experts=True, stream=stream
    )
    response = client.post(COMPLETIONS, json=body)
    choice = (events(response)[-1] if stream else response.json())["choices"][0]
    ids, _ = scripted_routes(13)
    assert choice["routed_range"] == [0, 13]
    assert np.array_equal(load(choice["routed_experts"]), ids)
    assert load(choice["routed_experts"]).dtype == np.uint8
    assert "routed_weights" not in choice


def test_route_weights_are_given_when_asked_for(client: httpx.Client) -> None:
    body = completion_body(prompt=[70] * 10, max_tokens=4, return_routed_experts="weights")
    choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
    weights = load(choice["routed_weights"])
    assert weights.dtype == np.float32
    assert np.array_equal(weights, scripted_routes(13)[1])


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(2, 5, [2, 5]), (None, 5, [0, 5]), (5, None, [5, 13]), (0, 99, [0, 13]), (50, 99, [13, 13])],
)
def test_a_part_of_the_routes_can_be_selected(
    start: int | None, end: int | None, expected: list[int], client: httpx.Client
) -> None:
    body = completion_body(
        prompt=[70] * 10,
        max_tokens=4,
        return_routed_experts=True,
        routed_experts_start=start,
        routed_experts_end=end,
    )
    choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
    assert choice["routed_range"] == expected
    expected_ids = scripted_routes(13)[0][expected[0] : expected[1]]
    assert np.array_equal(load(choice["routed_experts"]), expected_ids)


def test_false_asks_for_no_routes(client: httpx.Client, engine: ScriptedEngine) -> None:
    body = completion_body(max_tokens=1, return_routed_experts=False)
    choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
    assert "routed_experts" not in choice
    assert not engine.submits[-1].return_routes


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
@pytest.mark.parametrize(("kind", "status"), [("overloaded", 429), ("unavailable", 503)])
def test_a_refused_request_is_a_plain_error(
    kind: str, status: int, path: str, make_body: Any, stream: bool
) -> None:
    with ScriptedEngine(refuse_as=kind) as engine, running_server(engine) as (client, _):
        response = client.post(path, json=make_body(stream=stream))
    assert_error(response, status, None)
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
def test_a_generation_that_fails_is_an_error_with_its_reason(path: str, make_body: Any) -> None:
    with ScriptedEngine(error_after=2) as engine, running_server(engine) as (client, _):
        response = client.post(path, json=make_body())
    assert_error(response, 503, None)
    assert "router logits are not finite" in response.json()["error"]["message"]


@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
def test_a_stream_that_fails_ends_with_one_error_event(path: str, make_body: Any) -> None:
    with (
        ScriptedEngine(token_ids=tokens(TEXT), error_after=2) as engine,
        running_server(engine) as (client, _),
    ):
        response = client.post(path, json=make_body(stream=True))
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    assert response.status_code == 200
    assert "router logits" in json.loads(blocks[-1].removeprefix("data: "))["error"]["message"]
    assert [block for block in blocks if '"error"' in block] == blocks[-1:]


def test_a_silent_engine_ends_open_requests_after_the_limit() -> None:
    with (
        ScriptedEngine(deaf=True) as engine,
        running_server(engine, silence_seconds=0.4) as (client, _),
    ):
        response = client.post(COMPLETIONS, json=completion_body())
    assert_error(response, 503, None)
    assert "no word from the engine" in response.json()["error"]["message"]


def test_a_long_wait_in_the_queue_is_no_silence() -> None:
    with (
        ScriptedEngine(held=True) as engine,
        running_server(engine, silence_seconds=2.0) as (client, _),
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(client.post, COMPLETIONS, json=completion_body())
        wait_until(lambda: engine.num_status_queries >= 5, seconds=30)  # one each half second
        engine.held = False
        assert answer.result(30).status_code == 200


def test_text_of_a_whole_chat_is_the_decode_of_its_ids(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=chat_body(max_tokens=5, return_token_ids=True)).json()
    detokenizer = CODEC.detokenizer()
    ids = answer["choices"][0]["token_ids"]
    text = "".join(detokenizer.add(i) for i in ids) + detokenizer.finish()
    assert answer["choices"][0]["message"]["content"] == text
