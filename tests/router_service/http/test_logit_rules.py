"""Penalties, biases, allowed ids and bad words: what reaches the engine and what is refused."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import pytest

from cluster.errors import RequestError
from cluster.logit_rules import NO_RULES, LogitRules
from router_service.body_validation import validate
from router_service.protocol import CompletionBody
from router_service.requested_sampling import SamplingRules, requested_sampling
from router_service.sampling_defaults import SamplingDefaults
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    DEMO_MODEL,
    VOCAB_SIZE,
    assert_error,
    assert_serves,
    chat_body,
    completion_body,
    running_server,
    tokens,
)

ENDPOINTS = [(COMPLETIONS, completion_body), (CHAT, chat_body)]


@pytest.fixture(params=ENDPOINTS, ids=["completions", "chat"])
def rules_of(request: pytest.FixtureRequest, client: httpx.Client, engine: ScriptedEngine) -> Any:
    """The rules that a body's fields become."""
    path, make_body = request.param

    def submitted(**fields: Any) -> LogitRules:
        response = client.post(path, json=make_body(max_tokens=8, **fields))
        assert response.status_code == 200, response.text
        return engine.submits[-1].sampling.rules

    return submitted


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1},
        {"logit_bias": {}, "bad_words": [], "allowed_token_ids": None},
        {"presence_penalty": None, "repetition_penalty": None, "logit_bias": None},
    ],
)
def test_a_request_that_asks_for_nothing_has_no_rules(
    fields: dict[str, Any], rules_of: Any
) -> None:
    assert rules_of(**fields) == NO_RULES


def test_penalties_reach_the_engine(rules_of: Any) -> None:
    fields = {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1.1}
    assert rules_of(**fields) == LogitRules(**fields)


def test_biases_reach_the_engine(rules_of: Any) -> None:
    rules = rules_of(logit_bias={"5": -100, "0": 0.5, str(VOCAB_SIZE - 1): 100})
    assert rules == LogitRules(biased_token_ids=(5, 0, VOCAB_SIZE - 1), biases=(-100.0, 0.5, 100.0))


def test_allowed_ids_reach_the_engine_once_each(rules_of: Any) -> None:
    assert rules_of(allowed_token_ids=[7, 5, 7]) == LogitRules(allowed_token_ids=(7, 5))


def test_a_bad_word_is_barred_as_it_starts_and_as_it_follows_a_space(rules_of: Any) -> None:
    plain, spaced = tuple(tokens("the")), tuple(tokens(" the"))
    assert len(plain) == len(spaced)
    assert rules_of(bad_words=["the", " the"]) == LogitRules(bad_words=(plain, spaced))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS, ids=["completions", "chat"])
@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty", ["2", "2.1"]),
        ({"frequency_penalty": -3}, "frequency_penalty", ["-2", "-3"]),
        ({"frequency_penalty": "1"}, "frequency_penalty", ["number"]),
        ({"repetition_penalty": 0}, "repetition_penalty", ["0.01"]),
        ({"repetition_penalty": -1.0}, "repetition_penalty", ["0.01", "-1.0"]),
        ({"repetition_penalty": 1e300}, "repetition_penalty", ["100"]),
        ({"repetition_penalty": True}, "repetition_penalty", ["number"]),
        ({"logit_bias": [5]}, "logit_bias", ["object"]),
        ({"logit_bias": {"5": 101}}, "logit_bias.'5'", ["100", "101"]),
        ({"logit_bias": {"5": None}}, "logit_bias.'5'", ["number"]),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", ["token id", f"0 to {VOCAB_SIZE - 1}"]),
        ({"logit_bias": {"-1": 1}}, "logit_bias.'-1'", ["token id"]),
        ({"logit_bias": {"05": 1}}, "logit_bias.'05'", ["token id"]),
        ({"logit_bias": {"²": 1}}, None, ["token id"]),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, f"logit_bias.'{VOCAB_SIZE}'", ["token id"]),
        ({"logit_bias": {"9" * 5000: 1}}, None, ["token id"]),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", ["1024", "1025"]),
        ({"allowed_token_ids": []}, "allowed_token_ids", ["1"]),
        ({"allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids[1]", [str(VOCAB_SIZE)]),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids[0]", ["integer"]),
        ({"allowed_token_ids": [1] * 16_385}, "allowed_token_ids", ["16384", "16385"]),
        ({"allowed_token_ids": [2, 0], "min_tokens": 1}, "allowed_token_ids", ["none"]),
        ({"bad_words": "the"}, "bad_words", ["list"]),
        ({"bad_words": ["a", ""]}, "bad_words", ["empty"]),
        ({"bad_words": ["a", " "]}, "bad_words", ["blank"]),
        ({"bad_words": [5]}, "bad_words[0]", ["string"]),
        ({"bad_words": ["a"] * 129}, "bad_words", ["128"]),
        ({"bad_words": ["a" * 257]}, "bad_words[0]", ["256"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_value_is_refused_with_its_name_and_the_limits(
    fields: dict[str, Any],
    field: str | None,
    words: list[str],
    path: str,
    make_body: Any,
    stream: bool,
    client: httpx.Client,
) -> None:
    response = client.post(path, json=make_body(stream=stream, **fields))
    assert response.status_code == 400
    error = response.json()["error"]
    assert [word for word in words if word not in error["message"]] == []
    assert field is None or error["param"] == field
    assert len(error["message"]) < 400


def test_allowed_ids_that_are_all_bad_words_are_refused(client: httpx.Client) -> None:
    (token_id,) = tokens("the")
    body = completion_body(allowed_token_ids=[token_id], bad_words=["the"])
    assert_error(client.post(COMPLETIONS, json=body), 400, "allowed_token_ids")
    assert_serves(client)


def test_bad_words_that_bar_a_whole_vocabulary_are_refused() -> None:
    words = {"a": [0], " a": [1], "b": [2], " b": [3]}
    rules = SamplingRules(4, (), SamplingDefaults(), encode=words.__getitem__)
    body = validate(CompletionBody, completion_body(bad_words=["a", "b"]))
    with pytest.raises(RequestError, match=r"bad_words: of 4 ids none"):
        requested_sampling(body, rules, rules.logit_rules(body), max_tokens=4)


def test_the_checkpoint_s_repetition_penalty_holds_where_a_request_says_nothing(
    tmp_path: Path,
) -> None:
    model_dir = copytree(DEMO_MODEL, tmp_path / "model")
    (model_dir / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.05}))
    with ScriptedEngine() as engine, running_server(engine, model_dir=model_dir) as (client, _):
        for fields in ({}, {"repetition_penalty": 1}, {"repetition_penalty": 1.2}):
            client.post(COMPLETIONS, json=completion_body(max_tokens=1, **fields))
        sampled = [submit.sampling.rules.repetition_penalty for submit in engine.submits]
    assert sampled == [1.05, 1.0, 1.2]
