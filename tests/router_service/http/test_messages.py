"""Roles, content parts and tool turns, by the token ids that reach the engine."""

from typing import Any

import httpx
import pytest

from tests.router_service.http.helpers import CHAT, assert_error, assert_serves, chat_body, tokens

USER = {"role": "user", "content": "What is the weather?"}
ARGUMENTS = '{"city": "Oslo"}'


def prompt_ids(client: httpx.Client, messages: list[dict[str, Any]]) -> list[int]:
    body = chat_body(messages=messages, max_tokens=1, return_token_ids=True)
    response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["prompt_token_ids"]
    return ids


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def call(arguments: str, name: str = "get_weather") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_turn(*calls: dict[str, Any], **content: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **content}


def test_a_string_and_one_text_part_are_the_same_prompt(client: httpx.Client) -> None:
    assert prompt_ids(client, user([part("hello")])) == prompt_ids(client, user("hello"))


def test_several_parts_are_joined_in_order_with_a_newline(client: httpx.Client) -> None:
    parts = [part("one"), part("two"), part("three")]
    assert prompt_ids(client, user(parts)) == prompt_ids(client, user("one\ntwo\nthree"))


def test_no_parts_are_an_empty_text(client: httpx.Client) -> None:
    assert prompt_ids(client, user([])) == prompt_ids(client, user(""))


def test_developer_acts_as_system(client: httpx.Client) -> None:
    prompts = [
        prompt_ids(client, [{"role": role, "content": "Be brief."}, USER])
        for role in ("developer", "system")
    ]
    assert prompts[0] == prompts[1]


def test_developer_after_system_is_one_more_system_message(client: httpx.Client) -> None:
    prompts = [
        prompt_ids(
            client,
            [{"role": "system", "content": "a"}, {"role": role, "content": "Be brief."}, USER],
        )
        for role in ("developer", "system")
    ]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) > len(prompt_ids(client, [{"role": "system", "content": "a"}, USER]))


def test_special_tokens_written_in_a_message_are_recognised(client: httpx.Client) -> None:
    assert 2 in prompt_ids(client, user("<|im_end|>"))[3:-5]


@pytest.mark.parametrize("calls", [1, 2])
def test_absent_null_and_empty_content_of_a_tool_turn_are_the_same(
    calls: int, client: httpx.Client
) -> None:
    forms: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}, {"content": []}]
    answer = {"role": "tool", "tool_call_id": "c1", "content": "sun"}
    prompts = [
        prompt_ids(client, [USER, tool_turn(*[call(ARGUMENTS)] * calls, **form), answer])
        for form in forms
    ]
    assert all(prompt == prompts[0] for prompt in prompts)


@pytest.mark.parametrize("form", [{}, {"content": None}])
def test_absent_and_null_content_of_a_tool_message_are_empty(
    form: dict[str, Any], client: httpx.Client
) -> None:
    history = [USER, tool_turn(call(ARGUMENTS))]
    answer: dict[str, Any] = {"role": "tool", "tool_call_id": "c1"}
    empty = prompt_ids(client, [*history, {**answer, "content": ""}])
    assert prompt_ids(client, [*history, {**answer, **form}]) == empty


def test_the_tool_turn_reaches_the_prompt(client: httpx.Client) -> None:
    answer = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    ids = prompt_ids(client, [USER, tool_turn(call(ARGUMENTS)), answer, USER])
    expected = tokens(
        "<|im_start|>user\nWhat is the weather?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nWhat is the weather?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids == expected


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "[1]",
        '"x"',
        "not json",
        "null",
        "5",
        "[" * 5000,
        '{"a": NaN}',
        '{"a": [-Infinity]}',
        '{"a": 1e999}',
    ],
)
def test_tool_arguments_that_are_no_json_object_are_refused(
    arguments: str, client: httpx.Client
) -> None:
    response = client.post(CHAT, json=chat_body(messages=[USER, tool_turn(call(arguments))]))
    assert_error(response, 400, "messages[1].tool_calls[0].function.arguments")
    assert_serves(client)


def test_an_answer_is_accepted_back_as_it_was_given(client: httpx.Client) -> None:
    message = client.post(CHAT, json=chat_body(max_tokens=2)).json()["choices"][0]["message"]
    extra = {"tool_calls": None, "function_call": None, "audio": None, "annotations": []}
    extra |= {"a_field_that_only_the_sdk_knows": None}
    assert prompt_ids(client, [USER, {**message, **extra}, USER]) == prompt_ids(
        client, [USER, {"role": "assistant", "content": message["content"]}, USER]
    )


REFUSED: list[tuple[Any, str]] = [
    ({"role": "pirate", "content": "x"}, "role"),
    ({"role": 5, "content": "x"}, "role"),
    ({"content": "x"}, "role"),
    ({"role": "user"}, "content"),
    ({"role": "system", "content": None}, "content"),
    ({"role": "user", "content": 5}, "content"),
    ({"role": "user", "content": {"text": "x"}}, "content"),
    ({"role": "user", "content": ["x"]}, "content[0]"),
    ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "content[0].text"),
    ({"role": "user", "content": [{"text": "x"}]}, "content[0].type"),
    ({"role": "user", "content": [part("a"), {"type": "poem", "text": "x"}]}, "content[1].type"),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
        "content[0].type",
    ),
    ({"role": "user", "content": "x", "mood": "good"}, "mood"),
    ({"role": "user", "content": "x", "name": "Bob"}, "name"),
    ({"role": "user", "content": "x", "tool_calls": []}, "tool_calls"),
    (tool_turn({"id": "c", "type": "poem", "function": {}}), "tool_calls[0].type"),
    (tool_turn(call("{}", name="")), "tool_calls[0].function.name"),
    (tool_turn(call("{}", name="get weather")), "tool_calls[0].function.name"),
    (tool_turn(call("{}", name="f\n")), "tool_calls[0].function.name"),
    (tool_turn(call("{}", name="f" * 65)), "tool_calls[0].function.name"),
    (tool_turn({**call("{}"), "mood": "good"}), "tool_calls[0].mood"),
]


@pytest.mark.parametrize(("message", "field"), REFUSED)
def test_a_message_that_cannot_be_shown_to_the_model_is_refused_by_place(
    message: Any, field: str, client: httpx.Client
) -> None:
    response = client.post(CHAT, json=chat_body(messages=[USER, message]))
    assert_error(response, 400, f"messages[1].{field}")


@pytest.mark.parametrize("messages", ["hello", {}, [None], ["hello"], [[]]])
def test_messages_that_are_no_list_of_objects_are_refused(
    messages: Any, client: httpx.Client
) -> None:
    response = client.post(CHAT, json=chat_body(messages=messages))
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages")
    assert_serves(client)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a"}] * 16385,
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * 16384}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4}] * 4000,
    ],
    ids=["messages", "parts", "both"],
)
def test_more_messages_and_parts_than_can_be_looked_at_at_once_are_refused(
    messages: list[dict[str, Any]], client: httpx.Client
) -> None:
    response = client.post(CHAT, json=chat_body(messages=messages))
    assert_error(response, 400, "messages")
    assert "the limit is 16384" in response.json()["error"]["message"]


def test_of_a_key_that_a_model_wrote_twice_the_last_value_is_shown(client: httpx.Client) -> None:
    both, last = '{"city": "Rome", "city": "Oslo"}', ARGUMENTS
    assert prompt_ids(client, [USER, tool_turn(call(both)), USER]) == prompt_ids(
        client, [USER, tool_turn(call(last)), USER]
    )
