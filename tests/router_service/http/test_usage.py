from itertools import accumulate
from typing import Any

import httpx
import pytest

from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    assert_error,
    assert_serves,
    chat_body,
    completion_body,
    events,
    running_server,
    tokens,
)

ENDPOINTS = [(COMPLETIONS, completion_body), (CHAT, chat_body)]
INCLUDE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
def test_the_usage_chunk_comes_last_without_choices_and_equals_the_whole_answer(
    path: str, make_body: Any, client: httpx.Client
) -> None:
    whole = client.post(path, json=make_body(max_tokens=5)).json()
    chunks = events(client.post(path, json=make_body(max_tokens=5, **INCLUDE)))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
def test_chunks_before_the_usage_chunk_have_a_null_usage_and_one_choice(
    path: str, make_body: Any, client: httpx.Client
) -> None:
    chunks = events(client.post(path, json=make_body(max_tokens=5, **INCLUDE)))
    assert all(c["usage"] is None and len(c["choices"]) == 1 for c in chunks[:-1])


@pytest.mark.parametrize("choices", [{}, {"n": 3}])
@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
def test_continuous_usage_counts_what_was_told_and_ends_at_the_whole_usage(
    path: str, make_body: Any, choices: dict[str, int], client: httpx.Client
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = make_body(max_tokens=5, stream=True, stream_options=options, **choices)
    body["return_token_ids"] = True
    *chunks, last = events(client.post(path, json=body))
    told = accumulate(len(chunk["choices"][0].get("token_ids", [])) for chunk in chunks)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == list(told)
    assert counts[-1] == last["usage"]["completion_tokens"] == 5 * choices.get("n", 1)
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream_options": None},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False}},
        {"stream_options": {"include_usage": None}},
        {"stream_options": {"continuous_usage_stats": False}},
    ],
)
@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
def test_without_include_usage_no_chunk_has_usage_or_lacks_a_choice(
    path: str, make_body: Any, options: dict[str, Any], client: httpx.Client
) -> None:
    chunks = events(client.post(path, json=make_body(max_tokens=3, stream=True, **options)))
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
def test_stream_options_without_stream_are_refused(
    path: str, make_body: Any, stream: dict[str, Any], client: httpx.Client
) -> None:
    body = make_body(stream_options={"include_usage": True}, **stream)
    assert_error(client.post(path, json=body), 400, "stream_options")
    assert_serves(client)


def test_details_show_cached_and_replayed_tokens_zero_included(client: httpx.Client) -> None:
    usage = client.post(COMPLETIONS, json=completion_body()).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "replayed_tokens": 0}


def test_usage_is_summed_over_the_prompts_of_a_batch() -> None:
    with (
        ScriptedEngine(cached_tokens=16, replayed_tokens=32) as engine,
        running_server(engine) as (client, _),
    ):
        body = completion_body(prompt=["a", "b c d"], max_tokens=3)
        usage = client.post(COMPLETIONS, json=body).json()["usage"]
    prompt_tokens = len(tokens("a")) + len(tokens("b c d"))
    assert usage == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 6,
        "total_tokens": prompt_tokens + 6,
        "prompt_tokens_details": {"cached_tokens": 32, "replayed_tokens": 64},
    }
