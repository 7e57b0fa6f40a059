"""Stop strings seen from a client: streamed and whole, with token counts, ids and routes cut at the same place."""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import httpx
import numpy as np
import pytest

from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    CODEC,
    COMPLETIONS,
    chat_body,
    completion_body,
    events,
    running_server,
    stream_text,
    tokens,
)

TEXT = " one two three four five six seven eight"
STOPS: list[tuple[Any, str]] = [
    (" two three four", " one"),
    ("wo thr", " one t"),
    (["thre", "three f"], " one two "),
    ("never", TEXT),
    (["seven", "three"], " one two "),
    (" one", ""),
]


def num_tokens_until(stop: str) -> int:
    """1-based number of the token of TEXT that completes `stop`."""
    detokenizer = CODEC.detokenizer()
    texts = accumulate(detokenizer.add(token_id) for token_id in tokens(TEXT))
    return next(count for count, text in enumerate(texts, start=1) if stop in text)


@contextmanager
def running(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with running_server(engine) as (client, _):
        yield client


@pytest.mark.parametrize(("stop", "expected"), STOPS)
def test_a_whole_answer_ends_right_before_the_earliest_match(
    stop: Any, expected: str, client: httpx.Client
) -> None:
    body = completion_body(stop=stop, max_tokens=len(tokens(TEXT)))
    choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
    assert choice["text"] == expected
    assert choice["finish_reason"] == ("length" if stop == "never" else "stop")


@pytest.mark.parametrize(("stop", "expected"), STOPS)
@pytest.mark.parametrize(("path", "make_body"), [(COMPLETIONS, completion_body), (CHAT, chat_body)])
def test_a_stream_joins_to_the_whole_answer(
    stop: Any, expected: str, path: str, make_body: Any, client: httpx.Client
) -> None:
    body = make_body(stop=stop, max_tokens=len(tokens(TEXT)), stream=True)
    assert stream_text(events(client.post(path, json=body))) == expected


@pytest.mark.parametrize(("stop", "expected"), STOPS)
def test_a_whole_chat_ends_right_before_the_earliest_match(
    stop: Any, expected: str, client: httpx.Client
) -> None:
    body = chat_body(stop=stop, max_tokens=len(tokens(TEXT)))
    choice = client.post(CHAT, json=body).json()["choices"][0]
    assert choice["message"]["content"] == expected
    assert choice["finish_reason"] == ("length" if stop == "never" else "stop")


@pytest.mark.parametrize(("stop", "expected"), STOPS)
@pytest.mark.parametrize(("path", "make_body"), [(COMPLETIONS, completion_body), (CHAT, chat_body)])
def test_the_last_chunk_of_a_stream_says_whether_a_stop_string_ended_it(
    stop: Any, expected: str, path: str, make_body: Any, client: httpx.Client
) -> None:
    body = make_body(stop=stop, max_tokens=len(tokens(TEXT)), stream=True)
    reasons = [c["choices"][0]["finish_reason"] for c in events(client.post(path, json=body))]
    assert reasons[-1] == ("length" if expected == TEXT else "stop")
    assert set(reasons[:-1]) <= {None}


@pytest.mark.parametrize("stream", [False, True])
def test_usage_ids_and_engine_agree_on_the_token_that_completed_the_match(
    stream: bool, client: httpx.Client, engine: ScriptedEngine
) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body = completion_body(
        stop="hree fo", max_tokens=200, return_token_ids=True, stream=stream, **options
    )
    response = client.post(COMPLETIONS, json=body)
    parts = events(response) if stream else [response.json()]
    ids = [token_id for part in parts for c in part["choices"] for token_id in c["token_ids"]]
    count = num_tokens_until("hree fo")
    assert parts[-1]["usage"]["completion_tokens"] == count
    assert ids == tokens(TEXT)[:count]
    assert engine.finish_of(f"{parts[0]['id']}-0").num_output_tokens == count


def test_routes_are_cut_at_the_token_that_completed_the_match(client: httpx.Client) -> None:
    body = completion_body(
        prompt=[70, 71, 72], stop="hree fo", max_tokens=200, return_routed_experts=True
    )
    choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
    num_inputs = 3 + num_tokens_until("hree fo") - 1
    routes = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert choice["routed_range"] == [0, num_inputs]
    assert routes.shape[0] == num_inputs


def test_no_chunk_is_empty_before_the_last(client: httpx.Client) -> None:
    body = completion_body(stop="zzz", max_tokens=8, stream=True)
    chunks = events(client.post(COMPLETIONS, json=body))
    assert all(chunk["choices"][0]["text"] for chunk in chunks[:-1])


def test_an_end_of_sequence_id_ends_the_answer_with_stop() -> None:
    ids = [*tokens(" bye"), 2]
    with ScriptedEngine(token_ids=ids) as engine, running(engine) as client:
        body = client.post(COMPLETIONS, json=completion_body(max_tokens=50)).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["text"] == " bye"
    assert body["usage"]["completion_tokens"] == len(ids)


def test_ignore_eos_generates_to_the_limit() -> None:
    with ScriptedEngine(token_ids=[*tokens(" bye"), 2]) as engine, running(engine) as client:
        body = client.post(COMPLETIONS, json=completion_body(max_tokens=50, ignore_eos=True)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 50


def test_tokens_that_the_engine_made_beyond_the_match_are_not_shown() -> None:
    with (
        ScriptedEngine(token_ids=tokens(TEXT), tokens_per_step=5) as engine,
        running(engine) as client,
    ):
        body = completion_body(stop=" two", max_tokens=200, return_token_ids=True)
        answer = client.post(COMPLETIONS, json=body).json()
    assert answer["choices"][0]["token_ids"] == tokens(TEXT)[: num_tokens_until(" two")]
    assert answer["usage"]["completion_tokens"] == num_tokens_until(" two")
