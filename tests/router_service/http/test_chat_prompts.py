"""Prompts of chats: continued messages, variables of the template, names and reasoning where it shows them."""

from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from cluster.errors import RequestError
from router_service.body_validation import validate
from router_service.chat_prompt import chat_prompt
from router_service.protocol import ChatBody
from tests.helpers.chat_templates import (
    DEEPSEEK_R1,
    MISTRAL,
    MISTRAL_ARGS,
    NAMED,
    QWEN3,
    make_template,
)
from tests.router_service.http.helpers import CHAT, DEMO_MODEL, assert_error, chat_body, tokens

USER = {"role": "user", "content": "Count to three."}
BEGUN = {"role": "assistant", "content": "One, two,"}


def prompt(source: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    body = validate(ChatBody, chat_body(messages=messages, **fields))
    return chat_prompt(body, make_template(source))


def refused_field(source: str, messages: list[dict[str, Any]], **fields: Any) -> str | None:
    with pytest.raises(RequestError) as refused:
        prompt(source, messages, **fields)
    assert str(refused.value).startswith(f"{refused.value.field}: ")
    return refused.value.field


def test_without_a_generation_prompt_the_chat_ends_with_its_last_message() -> None:
    closed = prompt(QWEN3, [USER], add_generation_prompt=False)
    assert closed.endswith("Count to three.<|im_end|>\n")
    assert prompt(QWEN3, [USER]) == closed + "<|im_start|>assistant\n"


@pytest.mark.parametrize("generation", [{}, {"add_generation_prompt": False}])
def test_the_last_message_is_left_open_to_be_continued(generation: dict[str, Any]) -> None:
    text = prompt(QWEN3, [USER, BEGUN], continue_final_message=True, **generation)
    assert text.endswith("<|im_start|>assistant\nOne, two,")


@pytest.mark.parametrize("content", ["One, two,", "One, ", " One\n", "Count to three.", "é <|x|> "])
@pytest.mark.parametrize("role", ["assistant", "user"])
@pytest.mark.parametrize("source", [QWEN3, MISTRAL])
def test_a_continued_message_ends_where_it_ends_in_transformers(
    source: str, role: str, content: str
) -> None:
    messages = [USER, {"role": role, "content": content}]
    reference = AutoTokenizer.from_pretrained(DEMO_MODEL, bos_token="<s>")
    expected = reference.apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True
    )
    assert prompt(source, messages, continue_final_message=True) == expected


def test_the_tokens_of_a_continued_chat_reach_the_engine(client: httpx.Client) -> None:
    body = chat_body(
        messages=[USER, BEGUN], continue_final_message=True, return_token_ids=True, max_tokens=1
    )
    assert client.post(CHAT, json=body).json()["prompt_token_ids"] == tokens(
        "<|im_start|>user\nCount to three.<|im_end|>\n<|im_start|>assistant\nOne, two,"
    )


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("last", "fields"),
    [
        (BEGUN, {"add_generation_prompt": True}),
        ({"role": "assistant", "content": ""}, {}),
        ({"role": "assistant", "content": "x", "tool_calls": [CALL]}, {}),
    ],
)
def test_what_cannot_be_continued_is_refused(
    last: dict[str, Any], fields: dict[str, Any], client: httpx.Client
) -> None:
    body = chat_body(messages=[USER, last], continue_final_message=True, **fields)
    assert_error(client.post(CHAT, json=body), 400, "continue_final_message")


def test_a_message_that_the_template_does_not_show_cannot_be_continued() -> None:
    assert refused_field("nothing", [USER], continue_final_message=True) == "continue_final_message"


def test_variables_of_the_template_are_passed_to_it() -> None:
    thinking = prompt(QWEN3, [USER])
    silent = prompt(QWEN3, [USER], chat_template_kwargs={"enable_thinking": False})
    assert silent == thinking + "<think>\n\n</think>\n\n"


def test_a_variable_that_the_template_itself_may_set_can_be_given() -> None:
    text = prompt(DEEPSEEK_R1, [USER], chat_template_kwargs={"thinking": False})
    assert text.endswith("<｜Assistant｜></think>")


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "add_generation_prompt", "bos_token", "ns", "no_such", "raise_exception"],
)
def test_reserved_and_unknown_variables_are_refused_by_name(name: str) -> None:
    field = refused_field(QWEN3, [USER], chat_template_kwargs={name: True})
    assert field == f"chat_template_kwargs.{name}"


def test_names_are_shown_where_the_template_shows_them() -> None:
    assert prompt(NAMED, [{**USER, "name": "Bob"}]) == "user Bob: Count to three.\nassistant: "


@pytest.mark.parametrize(
    "message",
    [{**USER, "name": "Bob"}, {**BEGUN, "name": "Eve"}, {"role": "tool", "name": "f"}],
    ids=["user", "assistant", "tool"],
)
def test_a_name_that_the_template_does_not_show_is_refused(message: dict[str, Any]) -> None:
    assert refused_field(QWEN3, [USER, message]) == "messages[1].name"


def test_a_tool_message_may_repeat_the_name_of_its_call_and_no_other() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c", "content": "4"}
    named = prompt(QWEN3, [USER, turn, {**result, "name": "f"}])
    assert named == prompt(QWEN3, [USER, turn, result])
    assert refused_field(QWEN3, [USER, turn, {**result, "name": "g"}]) == "messages[2].name"
    stray = {**result, "name": "f", "tool_call_id": "d"}
    assert refused_field(QWEN3, [USER, turn, stray]) == "messages[2].name"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_of_an_earlier_answer_is_given_to_templates_that_show_it(field: str) -> None:
    text = prompt(QWEN3, [USER, {**BEGUN, field: "Hm."}], continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\n<think>\nHm.\n</think>\n\nOne, two,")


def test_reasoning_is_refused_where_it_would_not_be_shown() -> None:
    messages = [USER, {**BEGUN, "reasoning_content": "Hm."}, USER]
    assert refused_field(NAMED, messages) == "messages[1].reasoning_content"


def test_two_different_reasonings_are_refused(client: httpx.Client) -> None:
    message = {**BEGUN, "reasoning": "a", "reasoning_content": "b"}
    response = client.post(CHAT, json=chat_body(messages=[message]))
    assert_error(response, 400, "messages[0].reasoning")


@pytest.mark.parametrize(
    ("source", "shows_tools", "shows_calls"),
    [
        (QWEN3, True, True),
        (DEEPSEEK_R1, True, True),
        (MISTRAL, True, True),
        (MISTRAL_ARGS, True, True),
        (NAMED, False, False),
    ],
)
def test_it_is_found_out_what_a_template_shows(
    source: str, shows_tools: bool, shows_calls: bool
) -> None:
    traits = make_template(source).traits
    assert (traits.shows_tools, traits.tool_call_form is not None) == (shows_tools, shows_calls)
