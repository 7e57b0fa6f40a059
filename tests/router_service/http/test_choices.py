"""n choices: all of them, once each, with one end each, numbered prompt by prompt; the prompt counts once."""

import base64
import io
from collections import defaultdict
from typing import Any

import httpx
import numpy as np
import pytest

from tests.helpers.scripted_engine import ScriptedEngine, wait_until
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    assert_error,
    chat_body,
    completion_body,
    events,
    running_server,
    tokens,
)

TEXTS = [" one two three", " four", " five six seven eight nine", " ten eleven"]
LONGEST = max(len(tokens(text)) for text in TEXTS)


def make_engine(**fields: Any) -> ScriptedEngine:
    """Choices that end at different times, by an end-of-sequence token."""
    answers = {choice: [*tokens(text), 2] for choice, text in enumerate(TEXTS)}
    return ScriptedEngine(choice_answers=answers, **fields)


def by_index(chunks: list[dict[str, Any]]) -> dict[int, tuple[str, list[str]]]:
    """Text and finish reasons of each choice of a stream."""
    texts: dict[int, str] = defaultdict(str)
    ends: dict[int, list[str]] = defaultdict(list)
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get(
                "content", ""
            )
            if choice["finish_reason"] is not None:
                ends[choice["index"]].append(choice["finish_reason"])
    return {index: (texts[index], ends[index]) for index in sorted(texts)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "make_body"), [(COMPLETIONS, completion_body), (CHAT, chat_body)])
def test_every_choice_comes_once_with_its_own_end(path: str, make_body: Any, stream: bool) -> None:
    with make_engine() as engine, running_server(engine) as (client, _):
        response = client.post(path, json=make_body(n=4, max_tokens=50, stream=stream))
        if stream:
            got = by_index(events(response))
        else:
            got = {
                choice["index"]: (
                    choice.get("text") or choice["message"]["content"],
                    [choice["finish_reason"]],
                )
                for choice in response.json()["choices"]
            }
    assert got == {index: (text, ["stop"]) for index, text in enumerate(TEXTS)}


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(stream: bool) -> None:
    with make_engine() as engine, running_server(engine) as (client, _):
        body = completion_body(prompt=["hello", "hello there"], n=3, max_tokens=50, stream=stream)
        response = client.post(COMPLETIONS, json=body)
        if stream:
            got = {index: text for index, (text, _) in by_index(events(response)).items()}
        else:
            got = {c["index"]: c["text"] for c in response.json()["choices"]}
    assert got == {index: TEXTS[index % 3] for index in range(6)}
    leaders = [submit.leader_id for submit in engine.submits]
    ids = [submit.request_id for submit in engine.submits]
    assert [submit.choice for submit in engine.submits] == [0, 1, 2, 0, 1, 2]
    assert leaders == [None, ids[0], ids[0], None, ids[3], ids[3]]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_the_prompt_once_and_every_completion(stream: bool) -> None:
    fields = {"n": 3, "max_tokens": 50, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    with make_engine(cached_tokens=1) as engine, running_server(engine) as (client, _):
        response = client.post(COMPLETIONS, json=completion_body(**fields))
        usage = events(response)[-1]["usage"] if stream else response.json()["usage"]
    num_prompt = len(tokens("hello"))
    num_completion = sum(len(tokens(text)) + 1 for text in TEXTS[:3])
    assert usage["prompt_tokens"] == num_prompt
    assert usage["completion_tokens"] == num_completion
    assert usage["total_tokens"] == num_prompt + num_completion
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1


def test_a_stop_string_ends_its_own_choice_only() -> None:
    with make_engine() as engine, running_server(engine) as (client, _):
        choices = client.post(
            COMPLETIONS, json=completion_body(n=3, max_tokens=50, stop=[" two"])
        ).json()["choices"]
    assert [choice["text"] for choice in choices] == [" one", TEXTS[1], TEXTS[2]]


def test_a_client_that_leaves_takes_all_its_choices_along() -> None:
    with make_engine(held=True) as engine, running_server(engine) as (client, _):
        with pytest.raises(httpx.ReadTimeout):
            client.post(COMPLETIONS, json=completion_body(n=3, max_tokens=5), timeout=2.0)
        wait_until(lambda: len(engine.aborts) == 3)
        assert client.get("/health/live").status_code == 200
    assert sorted(engine.aborts) == sorted(submit.request_id for submit in engine.submits)


def load(encoded: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(encoded)))


@pytest.mark.parametrize("stream", [False, True])
def test_routes_of_the_prompt_come_once_and_choices_have_those_of_their_completion(
    stream: bool,
) -> None:
    fields = {"return_routed_experts": "weights", "max_tokens": 50, "stream": stream}
    num_prompt = len(tokens("hello there"))
    with make_engine() as engine, running_server(engine) as (client, _):

        def ask(n: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            body = completion_body(prompt="hello there", n=n, **fields)
            response = client.post(COMPLETIONS, json=body)
            answers = events(response) if stream else [response.json()]
            choices = [c for answer in answers for c in answer["choices"] if "routed_range" in c]
            return sorted(choices, key=lambda c: c["index"]), answers

        (alone,), _ = ask(1)
        choices, answers = ask(3)
    (top,) = [answer for answer in answers if "prompt_routed_experts" in answer]
    assert top["prompt_routed_range"] == [0, num_prompt]
    for index, choice in enumerate(choices):
        end = num_prompt + len(tokens(TEXTS[index]))  # the end of sequence was no input
        assert choice["routed_range"] == [num_prompt, end]
        assert len(load(choice["routed_experts"])) == end - num_prompt
    for name in ("experts", "weights"):
        whole = np.concatenate(
            [load(top[f"prompt_routed_{name}"]), load(choices[0][f"routed_{name}"])]
        )
        assert whole.tobytes() == load(alone[f"routed_{name}"]).tobytes()


@pytest.mark.parametrize("value", [0, -1, 129, 1.0, "1", True])
@pytest.mark.parametrize("stream", [False, True])
def test_other_numbers_of_choices_are_refused_by_name(value: Any, stream: bool) -> None:
    with make_engine() as engine, running_server(engine) as (client, _):
        for path, body in ((COMPLETIONS, completion_body()), (CHAT, chat_body())):
            assert_error(client.post(path, json={**body, "n": value, "stream": stream}), 400, "n")


def test_all_choices_of_all_prompts_are_bounded_together() -> None:
    with make_engine() as engine, running_server(engine) as (client, _):
        allowed = completion_body(prompt=["hello"] * 16, n=64, max_tokens=1)
        assert len(client.post(COMPLETIONS, json=allowed).json()["choices"]) == 1024
        for num_prompts, n in ((17, 64), (9, 128), (1024, 128), (1024, 2)):
            body = completion_body(prompt=["hello"] * num_prompts, n=n, max_tokens=1)
            assert_error(client.post(COMPLETIONS, json=body), 400, "n")
    assert len(engine.submits) == 1024


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "make_body"), [(COMPLETIONS, completion_body), (CHAT, chat_body)])
def test_choices_that_the_engine_has_no_room_for_are_one_plain_429(
    path: str, make_body: Any, stream: bool
) -> None:
    with make_engine(refuse_as="overloaded") as engine, running_server(engine) as (client, _):
        response = client.post(path, json=make_body(n=5, stream=stream))
        assert_error(response, 429, None)
        assert response.headers["retry-after"] == "1"
        assert client.get("/health").status_code == 200  # after whatever the engine would be told
    assert len(engine.submits) == 5
    assert engine.aborts == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refused", "of_completion", "of_chat"),
    [("prompt", "prompt", "messages"), ("logprobs", "logprobs", "logprobs"), (None, None, None)],
)
def test_a_refusal_of_the_engine_names_the_field_that_was_sent(
    refused: str | None, of_completion: str | None, of_chat: str | None, stream: bool
) -> None:
    engine = make_engine(refuse_as="invalid", refused_field=refused)
    with engine, running_server(engine) as (client, _):
        answer = client.post(COMPLETIONS, json=completion_body(stream=stream))
        assert_error(answer, 400, of_completion)
        assert_error(client.post(CHAT, json=chat_body(stream=stream)), 400, of_chat)


def test_best_of_may_only_say_the_same() -> None:
    with make_engine() as engine, running_server(engine) as (client, _):
        assert client.post(COMPLETIONS, json=completion_body(n=2, best_of=2)).status_code == 200
        for fields in ({"best_of": 2}, {"n": 2, "best_of": 3}, {"n": 3, "best_of": 2}):
            response = client.post(COMPLETIONS, json=completion_body(**fields))
            assert_error(response, 400, "best_of")
