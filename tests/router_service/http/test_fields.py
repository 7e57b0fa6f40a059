"""Every field is supported, or neutral, or refused by its name."""

import json
from typing import Any

import httpx
import pytest

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
]
COMPLETION_NEUTRAL: list[tuple[str, Any]] = [
    *BOTH_NEUTRAL,
    ("best_of", 1),
    ("echo", False),
    ("suffix", ""),
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
]
BOTH_REFUSED: list[tuple[str, Any]] = [
    ("n", 2),
    ("presence_penalty", 0.5),
    ("presence_penalty", False),
    ("frequency_penalty", -1),
    ("logit_bias", {"5": 1}),
    ("top_k", 5),
    ("min_p", 0.1),
    ("min_tokens", 1),
    ("repetition_penalty", 1.1),
    ("stop_token_ids", [5]),
    ("prompt_logprobs", 1),
    ("priority", 1),
    ("no_such_field", 1),
    ("Model", "demo"),
    ("extra_body", {}),
]
COMPLETION_REFUSED: list[tuple[str, Any]] = [
    *BOTH_REFUSED,
    ("best_of", 2),
    ("echo", True),
    ("logprobs", 0),
    ("logprobs", 5),
    ("suffix", "end"),
    ("messages", []),
    ("max_completion_tokens", 5),
]
CHAT_REFUSED: list[tuple[str, Any]] = [
    *BOTH_REFUSED,
    ("logprobs", True),
    ("top_logprobs", 5),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "auto"),
    ("tool_choice", "required"),
    ("parallel_tool_calls", True),
    ("store", True),
    ("metadata", {"a": "b"}),
    ("service_tier", "flex"),
    ("functions", []),
    ("prompt", "x"),
    ("reasoning_effort", "low"),
    ("chat_template_kwargs", {}),
]


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
    message = client.post(CHAT, json=chat_body(n=3)).json()["error"]["message"]
    assert message == "n: 3 is not supported; supported: null or 1"


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
    assert_error(response, 400, "tools")
    assert len(response.json()["error"]["message"]) < 300
