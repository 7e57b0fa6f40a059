"""top_k, min_p, min_tokens, stop_token_ids and priority: what reaches the engine, what is refused, what is shown."""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import pytest

from cluster.errors import RequestError
from cluster.logit_rules import NO_RULES
from cluster.messages import SamplingParams
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
    chat_body,
    completion_body,
    events,
    running_server,
    stream_text,
    tokens,
)

ENDPOINTS = [(COMPLETIONS, completion_body), (CHAT, chat_body)]
EOS = (2, 0)


@pytest.fixture
def bye() -> Iterator[tuple[httpx.Client, list[int]]]:
    """A server whose engine says " one two three", and the ids of that."""
    ids = tokens(" one two three")
    with ScriptedEngine(token_ids=ids) as engine, running_server(engine) as (client, _):
        yield client, ids


@pytest.fixture(params=ENDPOINTS, ids=["completions", "chat"])
def sampling_of(
    request: pytest.FixtureRequest, client: httpx.Client, engine: ScriptedEngine
) -> Any:
    """The sampling parameters that a body's fields become."""
    path, make_body = request.param

    def submitted(**fields: Any) -> SamplingParams:
        assert client.post(path, json=make_body(max_tokens=8, **fields)).status_code == 200
        return engine.submits[-1].sampling

    return submitted


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), (-1, None), (0, None), (1, 1), (40, 40), (VOCAB_SIZE, None), (10**30, None)],
)
def test_top_k_is_off_where_it_would_take_nothing_away(
    value: int | None, expected: int | None, sampling_of: Any
) -> None:
    assert sampling_of(top_k=value).top_k == expected


@pytest.mark.parametrize(("value", "expected"), [(None, 0.0), (0, 0.0), (0.1, 0.1), (1, 1.0)])
def test_min_p_reaches_the_engine(value: float | None, expected: float, sampling_of: Any) -> None:
    assert sampling_of(min_p=value).min_p == expected


def test_own_stop_ids_are_added_to_end_of_sequence(sampling_of: Any) -> None:
    assert sampling_of(stop_token_ids=[9, 2, 9]).stop_token_ids == (*EOS, 9)
    assert sampling_of(stop_token_ids=None).stop_token_ids == EOS


def test_ignore_eos_ignores_no_stop_id_of_the_request(sampling_of: Any) -> None:
    assert sampling_of(stop_token_ids=[9, 2], ignore_eos=True).stop_token_ids == (9, 2)
    assert sampling_of(ignore_eos=True).stop_token_ids == ()


def test_min_tokens_bars_end_of_sequence_and_own_stop_ids(sampling_of: Any) -> None:
    sampling = sampling_of(min_tokens=8, stop_token_ids=[9])
    assert (sampling.min_tokens, sampling.barred_token_ids) == (8, (*EOS, 9))


def test_min_tokens_bars_end_of_sequence_also_where_it_would_not_end_the_answer(
    sampling_of: Any,
) -> None:
    assert sampling_of(min_tokens=1, ignore_eos=True).barred_token_ids == EOS


def test_without_min_tokens_nothing_is_barred(sampling_of: Any) -> None:
    assert sampling_of(stop_token_ids=[9], min_tokens=0).barred_token_ids == ()


@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
@pytest.mark.parametrize("value", [None, 0, 7, -3, 2**63 - 1, -(2**63)])
def test_priority_reaches_the_engine(
    value: int | None, path: str, make_body: Any, client: httpx.Client, engine: ScriptedEngine
) -> None:
    assert client.post(path, json=make_body(max_tokens=1, priority=value)).status_code == 200
    assert engine.submits[-1].priority == (value or 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "make_body"), ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"top_k": -2}, "top_k", ["-1", "-2"]),
        ({"top_k": 5.0}, "top_k", ["integer", "5.0"]),
        ({"top_k": True}, "top_k", ["integer", "True"]),
        ({"min_p": 1.5}, "min_p", ["1", "1.5"]),
        ({"min_p": -0.1}, "min_p", ["0", "-0.1"]),
        ({"min_p": "0"}, "min_p", ["number"]),
        ({"min_tokens": -1}, "min_tokens", ["0", "-1"]),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", ["9", "max_tokens", "8"]),
        ({"min_tokens": 10**30, "max_tokens": 8}, "min_tokens", ["max_tokens", "8"]),
        ({"min_tokens": False}, "min_tokens", ["integer"]),
        ({"stop_token_ids": 5}, "stop_token_ids", ["list"]),
        ({"stop_token_ids": [5] * 129}, "stop_token_ids", ["128", "129"]),
        ({"stop_token_ids": [5, VOCAB_SIZE]}, "stop_token_ids[1]", ["3072", "0 to 3071"]),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ["-1", "0 to 3071"]),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]", ["integer"]),
        ({"stop_token_ids": ["x"]}, "stop_token_ids[0]", ["integer"]),
        ({"priority": 2**63}, "priority", [str(2**63 - 1)]),
        ({"priority": 0.5}, "priority", ["integer"]),
        ({"priority": False}, "priority", ["integer"]),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_the_limits(
    fields: dict[str, Any],
    field: str,
    words: list[str],
    path: str,
    make_body: Any,
    stream: bool,
    client: httpx.Client,
) -> None:
    response = client.post(path, json=make_body(stream=stream, **fields))
    assert_error(response, 400, field)
    message = response.json()["error"]["message"]
    assert [word for word in words if word not in message] == []


def test_min_tokens_over_the_default_of_max_tokens_is_refused(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json=completion_body(min_tokens=17))
    assert_error(response, 400, "min_tokens")
    assert "max_tokens, which is 16" in response.json()["error"]["message"]


def test_min_tokens_over_max_completion_tokens_names_that_field(client: httpx.Client) -> None:
    body = chat_body(min_tokens=9, max_completion_tokens=8)
    message = client.post(CHAT, json=body).json()["error"]["message"]
    assert "over max_completion_tokens, which is 8" in message


def test_stop_ids_that_leave_nothing_to_sample_are_refused() -> None:
    rules = SamplingRules(4, (0,), SamplingDefaults(), encode=lambda text: [3])
    fields = {"stop_token_ids": [1, 2, 3], "ignore_eos": True}
    body = validate(CompletionBody, completion_body(min_tokens=1, **fields))
    with pytest.raises(RequestError, match=r"stop_token_ids: .* all 4 ids"):
        requested_sampling(body, rules, NO_RULES, max_tokens=4)
    unlimited = validate(CompletionBody, completion_body(**fields))
    assert requested_sampling(unlimited, rules, NO_RULES, max_tokens=4).stop_token_ids == (1, 2, 3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_id_ends_the_answer_and_is_counted_but_has_no_text(
    ignore_eos: bool, stream: bool, bye: tuple[httpx.Client, list[int]]
) -> None:
    client, ids = bye
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body = completion_body(
        max_tokens=50,
        stop_token_ids=[ids[-1]],
        ignore_eos=ignore_eos,
        return_token_ids=True,
        stream=stream,
        **options,
    )
    response = client.post(COMPLETIONS, json=body)
    parts = events(response) if stream else [response.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    assert "".join(choice["text"] for choice in choices) == " one two"
    assert choices[-1]["finish_reason"] == "stop"
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == ids
    assert parts[-1]["usage"]["completion_tokens"] == len(ids)


def test_a_stop_id_has_no_text_in_a_chat_stream(bye: tuple[httpx.Client, list[int]]) -> None:
    client, ids = bye
    body = chat_body(max_tokens=50, stop_token_ids=[ids[-1]], stream=True)
    assert stream_text(events(client.post(CHAT, json=body))) == " one two"


def test_the_text_of_a_stop_id_completes_no_stop_string(
    bye: tuple[httpx.Client, list[int]],
) -> None:
    client, ids = bye
    body = completion_body(max_tokens=50, stop_token_ids=[ids[-1]], stop="two three")
    assert client.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == " one two"


def test_the_checkpoint_s_top_k_and_min_p_hold_where_a_request_says_nothing(tmp_path: Path) -> None:
    model_dir = copytree(DEMO_MODEL, tmp_path / "model")
    (model_dir / "generation_config.json").write_text(json.dumps({"top_k": 20, "min_p": 0.25}))
    with ScriptedEngine() as engine, running_server(engine, model_dir=model_dir) as (client, _):
        for fields in ({}, {"top_k": -1, "min_p": 0}, {"top_k": 3}):
            client.post(COMPLETIONS, json=completion_body(max_tokens=1, **fields))
        sampled = [(s.sampling.top_k, s.sampling.min_p) for s in engine.submits]
    assert sampled == [(20, 0.25), (None, 0.0), (3, 0.25)]
