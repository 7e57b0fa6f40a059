"""`logprobs` of output tokens: both shapes, whole and streamed, cut where the text is cut."""

from typing import Any

import httpx
import pytest

from tests.helpers.scripted_engine import ScriptedEngine, scripted_score
from tests.router_service.http.helpers import (
    CHAT,
    CODEC,
    COMPLETIONS,
    assert_error,
    chat_body,
    completion_body,
    events,
    running_server,
    tokens,
)

TEXT = " one two three four five"
IDS = tokens(TEXT)
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def client() -> Any:
    with ScriptedEngine(token_ids=IDS) as engine, running_server(engine) as (client, _):
        yield client


def completion(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(COMPLETIONS, json=completion_body(**({"max_tokens": len(IDS)} | fields)))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def joined(chunks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The lists of a streamed completion."""
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"]]
    return {name: [x for part in parts if part for x in part[name]] for name in LISTS}


@pytest.mark.parametrize("asked", [0, 1, 5, 20])
def test_completions_list_every_token_with_its_place_and_alternatives(
    client: httpx.Client, asked: int
) -> None:
    choice = completion(client, logprobs=asked)
    logprobs = choice["logprobs"]
    assert set(logprobs) == set(LISTS)
    assert all(len(logprobs[name]) == len(IDS) for name in LISTS)
    assert "".join(logprobs["tokens"]) == choice["text"] == TEXT
    for place, token_id in enumerate(IDS):
        logprob, listed = scripted_score(token_id, max(asked, 1))
        offset, token = logprobs["text_offset"][place], logprobs["tokens"][place]
        assert TEXT[offset : offset + len(token)] == token
        assert logprobs["token_logprobs"][place] == pytest.approx(logprob)
        expected = {CODEC.token_text(i): value for i, value in listed[:asked]}
        expected.setdefault(token, logprob)
        assert logprobs["top_logprobs"][place] == pytest.approx(expected)


@pytest.mark.parametrize("asked", [0, 2])
def test_a_streamed_completion_has_the_same_lists(client: httpx.Client, asked: int) -> None:
    body = completion_body(logprobs=asked, max_tokens=len(IDS), stream=True)
    streamed = joined(events(client.post(COMPLETIONS, json=body)))
    assert streamed == completion(client, logprobs=asked)["logprobs"]


@pytest.mark.parametrize("asked", [None, 0, 1, 3])
def test_chats_list_every_token_with_bytes_and_alternatives(
    client: httpx.Client, asked: int | None
) -> None:
    body = chat_body(max_tokens=len(IDS), logprobs=True, top_logprobs=asked)
    content = client.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == TEXT
    for entry, token_id in zip(content, IDS, strict=True):
        logprob, listed = scripted_score(token_id, max(asked or 0, 1))
        assert entry["logprob"] == pytest.approx(logprob)
        top = [(bytes(e["bytes"]), e["logprob"]) for e in entry["top_logprobs"]]
        expected = [(CODEC.token_bytes(i), value) for i, value in listed[: asked or 0]]
        assert top[: len(expected)] == [(b, pytest.approx(v)) for b, v in expected]
        if asked:
            assert CODEC.token_bytes(token_id) in [b for b, _ in top]
        else:
            assert top == []


def test_a_streamed_chat_has_the_same_entries(client: httpx.Client) -> None:
    fields = {"max_tokens": len(IDS), "logprobs": True, "top_logprobs": 2}
    whole = client.post(CHAT, json=chat_body(**fields)).json()["choices"][0]["logprobs"]
    chunks = events(client.post(CHAT, json=chat_body(**fields, stream=True)))
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"]]
    assert [e for part in parts if part for e in part["content"]] == whole["content"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [" three", "wo thr", " one"])
def test_lists_end_with_the_token_that_completed_the_stop_string(
    client: httpx.Client, stop: str, stream: bool
) -> None:
    body = completion_body(
        logprobs=1, stop=stop, max_tokens=len(IDS), stream=stream, return_token_ids=True
    )
    response = client.post(COMPLETIONS, json=body)
    if stream:
        chunks = events(response)
        logprobs = joined(chunks)
        ids = [i for c in chunks if c["choices"] for i in c["choices"][0].get("token_ids", [])]
        text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
    else:
        choice = response.json()["choices"][0]
        logprobs, ids, text = choice["logprobs"], choice["token_ids"], choice["text"]
    assert logprobs["tokens"] == [CODEC.token_text(token_id) for token_id in ids]
    assert stop in "".join(logprobs["tokens"])
    assert all(0 <= offset <= len(text) for offset in logprobs["text_offset"])


def test_half_characters_are_named_by_their_bytes() -> None:
    ids = tokens(" \U0001f469‍\U0001f680 e")
    with ScriptedEngine(token_ids=ids) as engine, running_server(engine) as (client, _):
        content = client.post(CHAT, json=chat_body(max_tokens=len(ids), logprobs=True)).json()[
            "choices"
        ][0]["logprobs"]["content"]
        assert b"".join(bytes(e["bytes"]) for e in content).decode() == " \U0001f469‍\U0001f680 e"
        halves = [e for e in content if e["token"].startswith("bytes:")]
        assert halves
        for entry in halves:
            assert entry["token"] == "bytes:" + "".join(f"\\x{b:02x}" for b in entry["bytes"])


def test_end_of_sequence_is_listed_as_it_is_written() -> None:
    with ScriptedEngine(token_ids=[IDS[0], 2]) as engine, running_server(engine) as (client, _):
        choice = completion(client, logprobs=0, max_tokens=9)
        assert choice["text"] == " one"
        assert choice["logprobs"]["tokens"] == [" one", CODEC.token_text(2)]
        assert choice["logprobs"]["text_offset"] == [0, 4]
        assert CODEC.token_text(2).startswith("<")


def test_without_being_asked_there_are_none_and_the_engine_is_not_asked() -> None:
    with ScriptedEngine(token_ids=IDS) as engine, running_server(engine) as (client, _):
        assert completion(client)["logprobs"] is None
        chat = client.post(CHAT, json=chat_body(max_tokens=2, logprobs=False))
        assert chat.json()["choices"][0]["logprobs"] is None
        assert [submit.return_scores for submit in engine.submits] == [False, False]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        *((COMPLETIONS, completion_body(logprobs=v), "logprobs") for v in (-1, 21, True, "1", 1.0)),
        *((CHAT, chat_body(logprobs=v), "logprobs") for v in (1, "true", [])),
        *(
            (CHAT, chat_body(logprobs=True, top_logprobs=v), "top_logprobs")
            for v in (-1, 21, True, "1")
        ),
        (CHAT, chat_body(top_logprobs=2), "top_logprobs"),
        (CHAT, chat_body(logprobs=False, top_logprobs=0), "top_logprobs"),
    ],
)
def test_other_values_are_refused_by_name(
    client: httpx.Client, path: str, body: dict[str, Any], field: str, stream: bool
) -> None:
    assert_error(client.post(path, json={**body, "stream": stream}), 400, field)
