"""Every field is supported, or neutral, or refused by its name."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from router_service.protocol import ChatBody, CompletionBody, StreamOptions
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    assert_error,
    assert_serves,
    chat_body,
    completion_body,
)

BOTH_NEUTRAL: list[tuple[str, Any]] = [
    ("n", 1),
    ("presence_penalty", 0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0),
    ("logit_bias", {}),
    ("user", "someone"),
    ("response_format", {"type": "text"}),
    ("repetition_penalty", 1),
    ("repetition_penalty", 1.0),
    ("length_penalty", 1.0),
    ("bad_words", []),
    ("include_stop_str_in_output", False),
    ("use_beam_search", False),
    ("skip_special_tokens", True),
    ("spaces_between_special_tokens", True),
    ("return_tokens_as_token_ids", False),
]
BOTH_NULL = (
    "allowed_token_ids",
    "truncate_prompt_tokens",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "logits_processors",
    "request_id",
    "kv_transfer_params",
    "vllm_xargs",
    "logprobs",
)
COMPLETION_NEUTRAL: list[tuple[str, Any]] = [
    *BOTH_NEUTRAL,
    ("best_of", 1),
    ("echo", False),
    ("suffix", ""),
    ("add_special_tokens", True),
    ("prompt_embeds", None),
]
CHAT_NEUTRAL: list[tuple[str, Any]] = [
    *BOTH_NEUTRAL,
    ("logprobs", False),
    ("response_format", {"type": "text"}),
    ("tools", []),
    ("tool_choice", "none"),
    ("store", False),
    ("service_tier", "auto"),
    ("service_tier", "default"),
    ("functions", []),
    ("function_call", "none"),
    ("metadata", {}),
    ("modalities", ["text"]),
    ("echo", False),
    ("add_generation_prompt", True),
    ("continue_final_message", False),
    ("add_special_tokens", False),
    ("chat_template_kwargs", {}),
    ("mm_processor_kwargs", {}),
    ("reasoning_effort", None),
]
BOTH_REFUSED: list[tuple[str, Any]] = [
    ("presence_penalty", False),
    ("length_penalty", 2),
    ("include_stop_str_in_output", True),
    ("use_beam_search", True),
    ("skip_special_tokens", False),
    ("skip_special_tokens", 1),
    ("request_id", "mine"),
    ("truncate_prompt_tokens", 5),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", True),
    ("prompt_logprobs", 1.5),
    ("prompt_logprobs", "1"),
    ("no_such_field", 1),
    ("Model", "demo"),
    ("extra_body", {}),
]
COMPLETION_REFUSED: list[tuple[str, Any]] = [
    *BOTH_REFUSED,
    ("best_of", 2),
    ("suffix", "end"),
    ("messages", []),
    ("max_completion_tokens", 5),
]
CHAT_REFUSED: list[tuple[str, Any]] = [
    *BOTH_REFUSED,
    ("top_logprobs", 5),
    ("tools", {}),
    ("tool_choice", "auto"),
    ("tool_choice", "required"),
    ("parallel_tool_calls", True),
    ("store", True),
    ("metadata", {"a": "b"}),
    ("service_tier", "flex"),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("prompt", "x"),
    ("reasoning_effort", "low"),
    ("chat_template_kwargs", [1]),
    ("add_generation_prompt", 1),
    ("continue_final_message", "yes"),
    ("chat_template", "{{ messages }}"),
    ("add_special_tokens", True),
    ("modalities", ["text", "audio"]),
    ("documents", []),
]


@pytest.mark.parametrize("field", ["no_such_field", "extra_body", "Model", "best-of"])
@pytest.mark.parametrize(("path", "make_body"), [(COMPLETIONS, completion_body), (CHAT, chat_body)])
def test_an_unknown_field_is_refused_also_as_null(
    path: str, make_body: Any, field: str, client: httpx.Client
) -> None:
    response = client.post(path, json=make_body(**{field: None}))
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]


@pytest.mark.parametrize("field", BOTH_NULL)
@pytest.mark.parametrize(("path", "make_body"), [(COMPLETIONS, completion_body), (CHAT, chat_body)])
def test_a_field_that_is_taken_as_null_alone_changes_nothing(
    path: str, make_body: Any, field: str, client: httpx.Client
) -> None:
    body = make_body(max_tokens=3)
    plain, with_null = (client.post(path, json=b).json() for b in (body, {**body, field: None}))
    assert with_null["choices"] == plain["choices"]


@pytest.mark.parametrize(("field", "value"), COMPLETION_NEUTRAL)
def test_completions_accept_a_field_at_its_neutral_value(
    field: str, value: Any, client: httpx.Client
) -> None:
    body = completion_body(max_tokens=1, **{field: value})
    assert client.post(COMPLETIONS, json=body).status_code == 200


@pytest.mark.parametrize(("field", "value"), CHAT_NEUTRAL)
def test_chats_accept_a_field_at_its_neutral_value(
    field: str, value: Any, client: httpx.Client
) -> None:
    body = chat_body(max_tokens=1, **{field: value})
    assert client.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("field", "value"), COMPLETION_REFUSED)
def test_completions_refuse_what_they_do_not_support_by_name(
    field: str, value: Any, stream: bool, client: httpx.Client
) -> None:
    body = completion_body(stream=stream, **{field: value})
    assert_error(client.post(COMPLETIONS, json=body), 400, field)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("field", "value"), CHAT_REFUSED)
def test_chats_refuse_what_they_do_not_support_by_name(
    field: str, value: Any, stream: bool, client: httpx.Client
) -> None:
    response = client.post(CHAT, json=chat_body(stream=stream, **{field: value}))
    assert_error(response, 400, field)


def test_a_refused_value_says_what_is_supported(client: httpx.Client) -> None:
    message = client.post(CHAT, json=chat_body(length_penalty=3)).json()["error"]["message"]
    assert message == "length_penalty: 3 is not supported; supported: null or 1 or 1.0"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"routed_experts_start": 0}, "routed_experts_start"),
        ({"routed_experts_end": 5}, "routed_experts_end"),
        ({"return_routed_experts": True, "routed_experts_start": -1}, "routed_experts_start"),
        ({"return_routed_experts": True, "routed_experts_end": 0}, "routed_experts_end"),
        (
            {
                "return_routed_experts": True,
                "routed_experts_start": 5,
                "routed_experts_end": 5,
            },
            "routed_experts_end",
        ),
        ({"stream": True, "stream_options": {"continuous": True}}, "stream_options.continuous"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"stream": True, "stream_options": True}, "stream_options"),
    ],
)
def test_fields_that_need_or_contradict_each_other_are_refused(
    fields: dict[str, Any], field: str, client: httpx.Client
) -> None:
    assert_error(client.post(COMPLETIONS, json=completion_body(**fields)), 400, field)
    assert_serves(client)


@pytest.mark.parametrize("depth", [50, 500, *range(900, 1000, 9), 5000])
@pytest.mark.parametrize("field", ["tools", "logit_bias", "no_such_field", "stop"])
def test_deeply_nested_values_are_refused_like_others(
    field: str, depth: int, client: httpx.Client
) -> None:
    nested = "[" * depth + "]" * depth
    content = json.dumps(chat_body())[:-1] + f', "{field}": {nested}}}'
    response = client.post(CHAT, content=content)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("depth", [500, *range(900, 1000, 9), 5000])
def test_deeply_nested_tool_arguments_are_rendered_or_refused(
    depth: int, client: httpx.Client
) -> None:
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    function = {"name": "f", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    body = chat_body(messages=[{"role": "assistant", "tool_calls": [call]}])
    response = client.post(CHAT, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_huge_wrong_value_makes_a_short_message(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat_body(tools=["x" * 2**20] * 3))
    assert_error(response, 400, "tools[0]")
    assert len(response.json()["error"]["message"]) < 300


@pytest.mark.parametrize("model", [CompletionBody, ChatBody, StreamOptions])
def test_every_field_has_its_name_on_the_api_page(model: type[BaseModel]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    named = set(re.findall(r"`(?:stream_options\.)?(\w+)`", page))
    assert set(model.model_fields) - named == set()
