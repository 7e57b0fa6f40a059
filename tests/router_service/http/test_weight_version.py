"""Every answer names the weights that made it."""

from typing import Any

import httpx
import pytest

from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    CREATED,
    MODEL,
    chat_body,
    completion_body,
    events,
    running_server,
)

ASKED = [(COMPLETIONS, completion_body()), (CHAT, chat_body(max_tokens=4))]


@pytest.mark.parametrize(("path", "body"), ASKED)
@pytest.mark.parametrize("fields", [{}, {"n": 2}])
def test_a_whole_answer_says_which_weights_made_it(
    path: str,
    body: dict[str, Any],
    fields: dict[str, Any],
    client: httpx.Client,
    engine: ScriptedEngine,
) -> None:
    answer = client.post(path, json=body | fields).json()
    assert answer["weight_version"] == engine.weight_version


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_every_chunk_of_a_stream_says_it_the_one_with_usage_too(
    path: str, body: dict[str, Any], client: httpx.Client, engine: ScriptedEngine
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post(path, json=body | options))
    assert chunks[-1]["choices"] == []
    assert {chunk["weight_version"] for chunk in chunks} == {engine.weight_version}


def test_the_model_card_says_which_weights_are_served(
    client: httpx.Client, engine: ScriptedEngine
) -> None:
    assert client.get(f"/v1/models/{MODEL}").json()["weight_version"] == engine.weight_version


def test_every_server_of_a_cell_says_the_same_of_when_the_model_was(engine: ScriptedEngine) -> None:
    with running_server(engine) as (first, _), running_server(engine) as (second, _):
        told = [client.get(f"/v1/models/{MODEL}").json()["created"] for client in (first, second)]
    assert told == [CREATED, CREATED]


def test_while_the_engine_cannot_be_asked_models_are_listed_without_it() -> None:
    with ScriptedEngine(deaf=True) as engine, running_server(engine) as (client, _):
        (card,) = client.get("/v1/models").json()["data"]
        assert (card["id"], card["weight_version"]) == (MODEL, None)
