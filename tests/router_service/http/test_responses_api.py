"""/v1/responses: a chat in other words, told to the SDK whole and as typed events."""

import json
from itertools import chain
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError, OpenAI
from openai.types.responses import Response

from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    MODEL,
    assert_error,
    assert_serves,
    chat_body,
    running_server,
    tokens,
)

RESPONSES = "/v1/responses"
TEXT = " one two three"
KINDS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 3,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
]


def sdk(client: httpx.Client) -> OpenAI:
    return OpenAI(base_url=str(client.base_url.join("/v1")), api_key="none", max_retries=0)


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hello", **fields}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Data of all events; each stands under its own name."""
    blocks = [block.split("\n") for block in response.text.removesuffix("\n\n").split("\n\n")]
    told = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in told]
    return told


def prompt_of(client: httpx.Client, engine: ScriptedEngine, **fields: Any) -> list[int]:
    """The prompt that the engine got for a response."""
    answer = client.post(RESPONSES, json=body_of(max_output_tokens=1, **fields))
    assert answer.status_code == 200, answer.text
    ids: list[int] = engine.submits[-1].prompt_token_ids.tolist()
    return ids


def chat_prompt(client: httpx.Client, messages: list[dict[str, Any]]) -> list[int]:
    answer = client.post(CHAT, json=chat_body(messages=messages, return_token_ids=True))
    ids: list[int] = answer.json()["prompt_token_ids"]
    return ids


def test_the_sdk_reads_a_whole_response(client: httpx.Client) -> None:
    with sdk(client) as openai:
        answer = openai.responses.create(model=MODEL, input="hello", max_output_tokens=3)
    assert answer.output_text == TEXT
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 3
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


def test_the_sdk_reads_the_events_of_a_stream(client: httpx.Client) -> None:
    with sdk(client) as openai:
        stream = openai.responses.create(
            model=MODEL, input="hello", max_output_tokens=3, stream=True
        )
        told = list(stream)
    assert [event.type for event in told] == KINDS
    assert [event.sequence_number for event in told] == list(range(len(KINDS)))
    deltas = [e.delta for e in told if e.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    last = told[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == TEXT


def test_the_sdks_stream_helper_ends_with_the_whole_response(client: httpx.Client) -> None:
    with (
        ScriptedEngine(token_ids=[*tokens(TEXT), 2]) as engine,
        running_server(engine) as (client, _),
        sdk(client) as openai,
        openai.responses.stream(model=MODEL, input="hello") as stream,
    ):
        stream.until_done()
        final = stream.get_final_response()
    assert final.output_text == TEXT
    assert final.status == "completed"
    assert final.incomplete_details is None


def test_the_last_event_holds_what_a_whole_answer_is(client: httpx.Client) -> None:
    body = body_of(max_output_tokens=3)
    whole = client.post(RESPONSES, json=body).json()
    last = events(client.post(RESPONSES, json={**body, "stream": True}))[-1]["response"]
    for answer in (whole, last):
        assert answer["id"].startswith("resp_")
        assert answer["output"][0]["id"].startswith("msg_")
        for part in (answer, answer["output"][0]):
            del part["id"]
        del answer["created_at"]
    assert last == whole


def test_a_whole_answer_is_a_response_to_the_last_type(client: httpx.Client) -> None:
    answer = client.post(RESPONSES, json=body_of(max_output_tokens=2)).json()
    answer["usage"]["input_tokens_details"]["cache_write_tokens"] = 0  # of no use here
    assert Response.model_validate(answer).output_text == " one two"


def test_usage_tells_where_the_prompt_came_from() -> None:
    with (
        ScriptedEngine(cached_tokens=4, replayed_tokens=2) as engine,
        running_server(engine) as (client, _),
    ):
        usage = client.post(RESPONSES, json=body_of(max_output_tokens=1)).json()["usage"]
        num_prompt_tokens = len(engine.submits[-1].prompt_token_ids)
    assert usage == {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 4, "replayed_tokens": 2},
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt_tokens + 1,
    }


def test_text_instructions_and_input_are_a_system_and_a_user_message(
    client: httpx.Client, engine: ScriptedEngine
) -> None:
    expected = chat_prompt(
        client, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    )
    assert prompt_of(client, engine, instructions="Be brief.", input="hi") == expected


def test_items_are_the_turns_of_a_chat(client: httpx.Client, engine: ScriptedEngine) -> None:
    calls = [
        {
            "id": f"c{i}",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
        }
        for i in range(2)
    ]
    expected = chat_prompt(
        client,
        [
            {"role": "system", "content": "a"},
            {"role": "user", "content": "one\ntwo"},
            {"role": "assistant", "content": "I ask.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c0", "content": "sun"},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "user", "content": "so?"},
        ],
    )
    call = {"type": "function_call", "name": "weather", "arguments": '{"city": "Oslo"}'}
    said = {"type": "output_text", "text": "I ask.", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "a"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": t} for t in ("one", "two")],
        },
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [said],
        },
        {**call, "call_id": "c0", "id": "fc_0", "status": "completed"},
        {**call, "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c0", "output": "sun"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "rain"}],
        },
        {"role": "user", "content": "so?"},
    ]
    assert prompt_of(client, engine, input=items) == expected


def test_what_came_out_can_go_in_again(client: httpx.Client, engine: ScriptedEngine) -> None:
    with sdk(client) as openai:
        first = openai.responses.create(model=MODEL, input="hello", max_output_tokens=3)
        openai.responses.create(
            model=MODEL,
            input=[
                {"role": "user", "content": "hello"},
                *first.output,  # type: ignore[list-item]  # as OpenAI's guide does it
                {"role": "user", "content": "and?"},
            ],
            max_output_tokens=1,
        )
    got = engine.submits[-1].prompt_token_ids.tolist()
    assert got == chat_prompt(
        client,
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": TEXT},
            {"role": "user", "content": "and?"},
        ],
    )


def test_nulls_that_an_sdk_writes_into_an_answer_mean_absent(
    client: httpx.Client, engine: ScriptedEngine
) -> None:
    def items(**nulls: None) -> list[dict[str, Any]]:
        call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
        part = {"type": "output_text", "text": "hm", **nulls}
        message = {"type": "message", "role": "assistant", "content": [part], **nulls}
        result = {"type": "function_call_output", "call_id": "1", "output": "2"}
        return [{"role": "user", "content": "hello"}, message, {**call, **nulls}, result]

    plain = prompt_of(client, engine, input=items())
    nulls: dict[str, None] = dict.fromkeys(("async", "async_", "namespace"))
    assert prompt_of(client, engine, input=items(**nulls)) == plain


def test_fields_of_a_chat_reach_the_engine(client: httpx.Client, engine: ScriptedEngine) -> None:
    client.post(
        RESPONSES,
        json=body_of(temperature=0.5, top_p=0.25, seed=7, top_k=3, max_output_tokens=1, priority=4),
    )
    submit = engine.submits[-1]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (
        0.5,
        0.25,
        7,
        3,
    )
    assert (sampling.max_tokens, submit.priority) == (1, 4)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_are_those_of_a_chat(stream: bool, client: httpx.Client) -> None:
    chat = client.post(CHAT, json=chat_body(max_tokens=3, logprobs=True, top_logprobs=2)).json()
    asked = body_of(
        max_output_tokens=3,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        stream=stream,
    )
    answer = client.post(RESPONSES, json=asked)
    whole = events(answer)[-1]["response"] if stream else answer.json()
    part = whole["output"][0]["content"][0]
    assert part["logprobs"] == chat["choices"][0]["logprobs"]["content"]
    if stream:
        told = [e["logprobs"] for e in events(answer) if e["type"].endswith("text.delta")]
        assert list(chain.from_iterable(told)) == part["logprobs"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 300}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream_options": {"include_usage": False}}, "stream_options.include_usage"),
        ({"text": {"format": {"type": "nonsense"}}}, "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "no"}}}},
            "text.format.schema",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name"),
        ({"input": [3]}, "input[0]"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "", "arguments": "{}"}]},
            "input[0].name",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "x"}]},
            "input[0].arguments",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_its_own_name(
    fields: dict[str, Any], field: str | None, client: httpx.Client
) -> None:
    response = client.post(RESPONSES, json=body_of(**fields))
    assert_error(response, 400, field or "input[0].content[0].type")
    message = response.json()["error"]["message"]
    assert "max_completion_tokens" not in message
    assert "response_format" not in message


def test_a_prompt_that_does_not_fit_is_called_input(client: httpx.Client) -> None:
    response = client.post(RESPONSES, json=body_of(input="one two " * 300))
    assert_error(response, 400, "input")
    assert response.json()["error"]["message"].startswith("input: ")


def test_null_store_and_neutral_fields_are_accepted(client: httpx.Client) -> None:
    body = body_of(
        store=False,
        previous_response_id=None,
        background=False,
        truncation="disabled",
        text={"format": {"type": "text"}},
        tools=[],
        metadata={},
        stream_options={"include_usage": True, "include_obfuscation": False},
        max_output_tokens=1,
    )
    assert client.post(RESPONSES, json=body).status_code == 200


def test_the_sdk_raises_for_what_is_stored(client: httpx.Client) -> None:
    with sdk(client) as openai, pytest.raises(BadRequestError) as raised:
        openai.responses.create(model=MODEL, input="x", store=True)
    assert raised.value.param == "store"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_a_plain_error(stream: bool) -> None:
    with ScriptedEngine(refuse_as="overloaded") as engine, running_server(engine) as (client, _):
        assert_error(client.post(RESPONSES, json=body_of(stream=stream)), 429, None)
        with sdk(client) as openai, pytest.raises(APIStatusError):
            openai.responses.create(model=MODEL, input="x", stream=stream)


def test_a_stream_that_breaks_ends_with_a_failed_response() -> None:
    with (
        ScriptedEngine(token_ids=tokens(TEXT), error_after=2) as engine,
        running_server(engine) as (client, _),
    ):
        told = events(client.post(RESPONSES, json=body_of(stream=True)))
        assert_serves_again(client, engine)
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["status"] == "failed"
    assert "router logits" in told[-1]["response"]["error"]["message"]
    assert told[-1]["sequence_number"] == len(told) - 1


def assert_serves_again(client: httpx.Client, engine: ScriptedEngine) -> None:
    engine.error_after = None
    assert_serves(client)


def test_an_answer_without_text_is_an_empty_part() -> None:
    with ScriptedEngine(token_ids=[2]) as engine, running_server(engine) as (client, _):
        whole = client.post(RESPONSES, json=body_of()).json()
        told = events(client.post(RESPONSES, json=body_of(stream=True)))
    assert whole["status"] == "completed"
    assert whole["output"][0]["content"][0]["text"] == ""
    assert [e["type"] for e in told] == [
        k.replace("incomplete", "completed") for k in KINDS if not k.endswith("text.delta")
    ]
