"""Empty, mixed and out-of-range prompts: a 400 that names the place, or one answer per prompt."""

from typing import Any

import httpx
import pytest

from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    VOCAB_SIZE,
    assert_error,
    assert_serves,
    chat_body,
    completion_body,
    events,
    running_server,
    tokens,
)

REFUSED: list[tuple[Any, str]] = [
    ("", "prompt"),
    ([], "prompt"),
    ([""], "prompt[0]"),
    ([[]], "prompt[0]"),
    (["a", ""], "prompt[1]"),
    ([[1, 2], []], "prompt[1]"),
    ([-1], "prompt[0]"),
    ([VOCAB_SIZE], "prompt[0]"),
    ([1, VOCAB_SIZE], "prompt[1]"),
    ([[1], [VOCAB_SIZE]], "prompt[1][0]"),
    ([2**70], "prompt[0]"),
    ([1.0], "prompt[0]"),
    ([1, 2.0], "prompt[1]"),
    ([True], "prompt[0]"),
    ([1, True], "prompt[1]"),
    ([1, "a"], "prompt[1]"),
    ([1, None], "prompt[1]"),
    (["a", 1], "prompt[1]"),
    (["a", [1]], "prompt[1]"),
    ([[1], "a"], "prompt[1]"),
    ([[[1]]], "prompt[0][0]"),
    ([None], "prompt[0]"),
    ([{}], "prompt[0]"),
    (None, "prompt"),
    (5, "prompt"),
    (True, "prompt"),
    ({"a": 1}, "prompt"),
    (["a"] * 1025, "prompt"),
]
ACCEPTED: list[tuple[Any, list[list[int]]]] = [
    ([1, 2], [[1, 2]]),
    ([0], [[0]]),
    ([VOCAB_SIZE - 1], [[VOCAB_SIZE - 1]]),
    ([[1], [2, 3]], [[1], [2, 3]]),
    ("hello you", [tokens("hello you")]),
    (["hello", "you"], [tokens("hello"), tokens("you")]),
    (" ", [tokens(" ")]),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "field"), REFUSED)
def test_a_prompt_that_cannot_be_served_is_refused_by_place(
    prompt: Any, field: str, stream: bool, client: httpx.Client
) -> None:
    body = completion_body(prompt=prompt, stream=stream)
    assert_error(client.post(COMPLETIONS, json=body), 400, field)


def test_a_missing_prompt_is_refused_and_the_server_goes_on(client: httpx.Client) -> None:
    assert_error(client.post(COMPLETIONS, json={"model": "demo"}), 400, "prompt")
    assert_serves(client)


@pytest.mark.parametrize(("prompt", "expected"), ACCEPTED)
def test_a_prompt_reaches_the_engine_as_these_ids(prompt: Any, expected: list[list[int]]) -> None:
    with ScriptedEngine() as engine, running_server(engine) as (client, _):
        assert client.post(COMPLETIONS, json=completion_body(prompt=prompt)).status_code == 200
        submitted = [submit.prompt_token_ids.tolist() for submit in engine.submits]
    assert submitted == expected


def test_choices_of_a_batch_are_in_the_order_of_the_prompts() -> None:
    answers = {(70,): tokens(" first"), (71,): tokens(" second"), (72,): tokens(" third")}
    with ScriptedEngine(answers=answers) as engine, running_server(engine) as (client, _):
        body = completion_body(prompt=[[70], [71], [72]], max_tokens=1, return_token_ids=True)
        answer = client.post(COMPLETIONS, json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [c["token_ids"] for c in answer["choices"]] == [a[:1] for a in answers.values()]
    assert answer["prompt_token_ids"] == [[70], [71], [72]]


def test_a_streamed_batch_interleaves_by_index_and_ends_each_choice_once() -> None:
    answers = {(70,): tokens(" one two three"), (71,): tokens(" four five")}
    with ScriptedEngine(answers=answers) as engine, running_server(engine) as (client, _):
        body = completion_body(prompt=[[70], [71]], max_tokens=4, stream=True)
        chunks = events(client.post(COMPLETIONS, json=body))
        whole = client.post(COMPLETIONS, json={**body, "stream": False}).json()
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = ["".join(c["text"] for c in choices if c["index"] == index) for index in (0, 1)]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1]


def test_no_messages_are_refused(client: httpx.Client) -> None:
    assert_error(client.post(CHAT, json=chat_body(messages=[])), 400, "messages")
    assert_serves(client)


def test_one_message_with_an_empty_text_is_answered(client: httpx.Client) -> None:
    body = chat_body(messages=[{"role": "user", "content": ""}], max_tokens=2)
    assert client.post(CHAT, json=body).status_code == 200
