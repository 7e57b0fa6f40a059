"""/v1/messages: a chat in Anthropic's words, told to its SDK whole and as events."""

import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from router_service.api_keys import parse_api_keys
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    MODEL,
    assert_serves,
    chat_body,
    running_server,
    tokens,
)

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEXT = " one two three"
TEXT_BLOCK = {"type": "text", "text": "x"}
CALL_BLOCK = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": None}}
KEY = "a-key-of-this-server"


def sdk(client: httpx.Client, key: str = "none") -> Anthropic:
    return Anthropic(base_url=str(client.base_url), api_key=key, max_retries=0)


def body_of(**fields: Any) -> dict[str, Any]:
    user = {"role": "user", "content": "hello"}
    return {"model": MODEL, "max_tokens": 3, "messages": [user], **fields}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Data of all events; each stands under its own name."""
    blocks = [block.split("\n") for block in response.text.removesuffix("\n\n").split("\n\n")]
    told = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in told]
    return told


def assert_anthropic_error(response: httpx.Response, status: int, kind: str) -> str:
    """The message of an error in Anthropic's shape."""
    assert response.status_code == status, response.text
    answer = response.json()
    assert set(answer) == {"type", "error"}
    assert answer["type"] == "error"
    assert set(answer["error"]) == {"type", "message"}
    assert answer["error"]["type"] == kind
    message: str = answer["error"]["message"]
    return message


def prompt_of(client: httpx.Client, engine: ScriptedEngine, **fields: Any) -> list[int]:
    """The prompt that the engine got; what count_tokens says is its length."""
    answer = client.post(MESSAGES, json=body_of(**fields))
    assert answer.status_code == 200, answer.text
    ids: list[int] = engine.submits[-1].prompt_token_ids.tolist()
    counted = {k: v for k, v in body_of(**fields).items() if k != "max_tokens"}
    assert client.post(COUNT, json=counted).json() == {"input_tokens": len(ids)}
    return ids


def chat_prompt(client: httpx.Client, messages: list[dict[str, Any]]) -> list[int]:
    answer = client.post(CHAT, json=chat_body(messages=messages, return_token_ids=True))
    ids: list[int] = answer.json()["prompt_token_ids"]
    return ids


def test_the_sdk_reads_a_whole_message(client: httpx.Client) -> None:
    with sdk(client) as claude:
        answer = claude.messages.create(
            model=MODEL, max_tokens=3, messages=[{"role": "user", "content": "hello"}]
        )
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == TEXT
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == (
        "assistant",
        "max_tokens",
        None,
    )
    assert answer.usage.output_tokens == 3


def test_the_sdk_reads_the_events_of_a_stream(client: httpx.Client) -> None:
    with sdk(client) as claude:
        stream = claude.messages.create(
            model=MODEL,
            max_tokens=3,
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
        )
        kinds = [event.type for event in stream]
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_the_sdks_stream_helper_ends_with_the_whole_message(client: httpx.Client) -> None:
    user: anthropic.types.MessageParam = {"role": "user", "content": "hello"}
    with sdk(client) as claude:
        whole = claude.messages.create(model=MODEL, max_tokens=3, messages=[user])
        with claude.messages.stream(model=MODEL, max_tokens=3, messages=[user]) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
    assert text == TEXT
    assert final.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ids", "stop", "reason", "sequence", "text"),
    [
        ([*tokens(" one two"), 2], ["three"], "end_turn", None, " one two"),
        (tokens(TEXT), ["three", " two"], "stop_sequence", " two", " one"),
        (tokens(TEXT), [" on", " one"], "stop_sequence", " on", ""),
        (tokens(TEXT), ["four"], "max_tokens", None, TEXT),
    ],
)
def test_the_reason_of_the_end_is_told(
    ids: list[int], stop: list[str], reason: str, sequence: str | None, text: str, stream: bool
) -> None:
    with ScriptedEngine(token_ids=ids) as engine, running_server(engine) as (client, _):
        response = client.post(MESSAGES, json=body_of(stop_sequences=stop, stream=stream))
    if stream:
        told = events(response)
        end = next(event for event in told if event["type"] == "message_delta")["delta"]
        said = "".join(e["delta"]["text"] for e in told if e["type"] == "content_block_delta")
    else:
        end = response.json()
        said = "".join(block["text"] for block in end["content"])
    assert (end["stop_reason"], end["stop_sequence"], said) == (reason, sequence, text)


def test_kinds_of_input_tokens_add_up_to_the_prompt() -> None:
    with ScriptedEngine(cached_tokens=4) as engine, running_server(engine) as (client, _):
        usage = client.post(MESSAGES, json=body_of()).json()["usage"]
        told = events(client.post(MESSAGES, json=body_of(stream=True)))
        num_prompt_tokens = len(engine.submits[-1].prompt_token_ids)
    assert usage == {
        "input_tokens": num_prompt_tokens - 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }
    assert told[0]["message"]["usage"]["input_tokens"] == num_prompt_tokens
    assert told[-2]["usage"] == usage


def test_system_and_blocks_are_the_turns_of_a_chat(
    client: httpx.Client, engine: ScriptedEngine
) -> None:
    calls = [
        {
            "id": f"c{i}",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Ålesund"}'},
        }
        for i in range(2)
    ]
    expected = chat_prompt(
        client,
        [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "one\ntwo\nthree"},
            {"role": "assistant", "content": "I ask.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c0", "content": "sun"},
            {"role": "tool", "tool_call_id": "c1", "content": "Error:\nno such place"},
            {"role": "user", "content": "so?"},
        ],
    )
    mark = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text"}
    use = {"type": "tool_use", "name": "weather", "input": {"city": "Ålesund"}}
    got = prompt_of(
        client,
        engine,
        system=[{**text, "text": "Be brief."}, {**text, "text": "Be kind.", **mark}],
        messages=[
            {"role": "user", "content": [{**text, "text": "one"}, {**text, "text": "two", **mark}]},
            {"role": "user", "content": "three"},
            {
                "role": "assistant",
                "content": [{**text, "text": "I ask."}, {**use, "id": "c0"}, {**use, "id": "c1"}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c0", "content": "sun"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{**text, "text": "no such place"}],
                        "is_error": True,
                    },
                    {**text, "text": "so?"},
                ],
            },
        ],
    )
    assert got == expected


def test_the_sdk_counts_tokens(client: httpx.Client, engine: ScriptedEngine) -> None:
    with sdk(client) as claude:
        counted = claude.messages.count_tokens(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], system="Be brief."
        )
    assert counted.input_tokens == len(prompt_of(client, engine, system="Be brief."))


def test_fields_of_a_chat_reach_the_engine(client: httpx.Client, engine: ScriptedEngine) -> None:
    fields = body_of(temperature=0.5, top_p=0.25, top_k=3, seed=7, metadata={"user_id": "u"})
    assert client.post(MESSAGES, json=fields).status_code == 200
    sampling = engine.submits[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (
        0.5,
        0.25,
        3,
        7,
    )
    assert sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 300}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, None),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"stop": "x"}, "stop"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"system": 3}, "system"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        (
            {"messages": [{"role": "assistant", "content": [CALL_BLOCK | {"caller": "x"}]}]},
            "messages[0].content[0].caller",
        ),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_a_wrong_field_is_refused_by_its_own_name(
    fields: dict[str, Any], field: str | None, client: httpx.Client
) -> None:
    response = client.post(MESSAGES, json=body_of(**fields))
    message = assert_anthropic_error(response, 400, "invalid_request_error")
    assert message.startswith(f"{field or 'messages[0].content[0].type'}: ")
    assert "max_completion_tokens" not in message.removeprefix("max_completion_tokens")
    assert_serves(client)


def test_max_tokens_is_required(client: httpx.Client) -> None:
    body = {name: value for name, value in body_of().items() if name != "max_tokens"}
    message = assert_anthropic_error(client.post(MESSAGES, json=body), 400, "invalid_request_error")
    assert message == "max_tokens: this field is required"


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_other_failures_have_the_same_shape(path: str, client: httpx.Client) -> None:
    asked = {k: v for k, v in body_of(model="nope").items() if k != "max_tokens" or path != COUNT}
    assert_anthropic_error(client.post(path, json=asked), 404, "not_found_error")
    assert_anthropic_error(client.post(path, content=b"{"), 400, "invalid_request_error")
    assert_anthropic_error(client.get(path), 405, "invalid_request_error")
    assert_anthropic_error(client.post(f"{path}/x", json={}), 404, "not_found_error")


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_rate_limit(stream: bool) -> None:
    with ScriptedEngine(refuse_as="overloaded") as engine, running_server(engine) as (client, _):
        response = client.post(MESSAGES, json=body_of(stream=stream))
        with sdk(client) as claude, pytest.raises(anthropic.RateLimitError):
            claude.messages.create(model=MODEL, max_tokens=1, messages=body_of()["messages"])
    assert_anthropic_error(response, 429, "rate_limit_error")
    assert response.headers["retry-after"] == "1"


def test_a_stream_that_breaks_ends_with_an_error_that_the_sdk_raises() -> None:
    with (
        ScriptedEngine(token_ids=tokens(TEXT), error_after=2) as engine,
        running_server(engine) as (client, _),
        sdk(client) as claude,
    ):
        told = events(client.post(MESSAGES, json=body_of(stream=True)))
        with pytest.raises(anthropic.APIStatusError, match="router logits"):
            list(
                claude.messages.create(
                    model=MODEL, max_tokens=3, messages=body_of()["messages"], stream=True
                )
            )
    assert told[-1]["type"] == "error"
    assert told[-1]["error"]["type"] == "api_error"


def test_the_key_goes_in_either_header(engine: ScriptedEngine) -> None:
    with running_server(engine, api_keys=parse_api_keys(f"{KEY}\n", "keys")) as (client, _):
        with sdk(client, KEY) as claude:
            answer = claude.messages.create(
                model=MODEL, max_tokens=1, messages=body_of()["messages"]
            )
        bearer = client.post(MESSAGES, json=body_of(), headers={"authorization": f"Bearer {KEY}"})
        wrong = client.post(MESSAGES, json=body_of(), headers={"x-api-key": "other"})
    assert answer.type == "message"
    assert bearer.status_code == 200
    assert_anthropic_error(wrong, 401, "authentication_error")


def test_an_answer_that_has_begun_goes_on(client: httpx.Client, engine: ScriptedEngine) -> None:
    begun = [*body_of()["messages"], {"role": "assistant", "content": "one"}]
    got = prompt_of(client, engine, messages=begun)
    chat = chat_body(
        messages=begun,
        continue_final_message=True,
        add_generation_prompt=False,
        return_token_ids=True,
    )
    assert got == client.post(CHAT, json=chat).json()["prompt_token_ids"]
    assert got[-1:] == tokens("one")


def test_an_answer_that_cannot_go_on_is_named_by_its_message(client: httpx.Client) -> None:
    begun = [*body_of()["messages"], {"role": "assistant", "content": ""}]
    response = client.post(MESSAGES, json=body_of(messages=begun))
    message = assert_anthropic_error(response, 400, "invalid_request_error")
    assert message.startswith("messages[1]: ")


def test_thinking_that_is_disabled_asks_for_nothing(
    client: httpx.Client, engine: ScriptedEngine
) -> None:
    plain = prompt_of(client, engine)
    assert prompt_of(client, engine, thinking={"type": "disabled"}) == plain


def test_nulls_that_an_sdk_writes_into_an_answer_mean_absent(
    client: httpx.Client, engine: ScriptedEngine
) -> None:
    def turns(**nulls: None) -> list[dict[str, Any]]:
        result = {"type": "tool_result", "tool_use_id": "1", "content": "2"}
        return [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [{**TEXT_BLOCK, **nulls}, {**CALL_BLOCK, **nulls}]},
            {"role": "user", "content": [result]},
        ]

    plain = prompt_of(client, engine, messages=turns())
    assert prompt_of(client, engine, messages=turns(caller=None, parsed_output=None)) == plain
