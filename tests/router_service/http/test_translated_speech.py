"""Tool calls and reasoning of a chat, as /v1/responses and /v1/messages tell them, to their SDKs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.helpers.chat_templates import QWEN3
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    MODEL,
    assert_error,
    model_with_template,
    running_server,
    tokens,
)

EOS = 2
SAID = (
    "<think>\nRain or sun?\n</think>\n\n"
    "I look."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS = [{"name": "weather", "parameters": SCHEMA}, {"name": "now", "parameters": None}]
RESPONSES_TOOLS: Any = [{"type": "function", "strict": None, **f} for f in FUNCTIONS]
MESSAGES_TOOLS: Any = [
    {"name": f["name"], "input_schema": f["parameters"] or {"type": "object"}} for f in FUNCTIONS
]
USER: Any = [{"role": "user", "content": "How is the weather?"}]
CALLS = [("weather", {"city": "Oslo"}), ("now", {})]


@contextmanager
def saying(text: str, model_dir: Path) -> Iterator[tuple[httpx.Client, ScriptedEngine]]:
    """A model that reasons and calls tools says this to everybody."""
    with (
        ScriptedEngine(token_ids=[*tokens(text), EOS]) as engine,
        running_server(engine, model_dir=model_dir, max_model_len=512) as (client, _),
    ):
        yield client, engine


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[httpx.Client, ScriptedEngine]]:
    with saying(SAID, model_with_template(tmp_path, QWEN3)) as served:
        yield served


def openai_sdk(client: httpx.Client) -> OpenAI:
    return OpenAI(base_url=str(client.base_url.join("/v1")), api_key="none", max_retries=0)


def anthropic_sdk(client: httpx.Client) -> Anthropic:
    return Anthropic(base_url=str(client.base_url), api_key="none", max_retries=0)


def test_the_openai_sdk_reads_reasoning_text_and_calls(
    served: tuple[httpx.Client, ScriptedEngine],
) -> None:
    client, _ = served
    with openai_sdk(client) as openai:
        answer = openai.responses.create(model=MODEL, input=USER, tools=RESPONSES_TOOLS)
    assert [item.type for item in answer.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert answer.output_text.strip() == "I look."
    assert answer.status == "completed"
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
    assert len({call.call_id for call in calls}) == 2
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


def test_streamed_items_are_those_of_the_whole_response(
    served: tuple[httpx.Client, ScriptedEngine],
) -> None:
    client, _ = served
    with openai_sdk(client) as openai:
        stream = openai.responses.create(
            model=MODEL, input=USER, tools=RESPONSES_TOOLS, stream=True
        )
        told = list(stream)
    last = told[-1]
    assert last.type == "response.completed"
    done = [event.item for event in told if event.type == "response.output_item.done"]
    added = [event.item for event in told if event.type == "response.output_item.added"]
    assert [item.id for item in added] == [item.id for item in done]
    assert done == last.response.output
    thought = [e.delta for e in told if e.type == "response.reasoning_text.delta"]
    assert "".join(thought).strip() == "Rain or sun?"
    pieces = [e for e in told if e.type == "response.function_call_arguments.delta"]
    whole = [e for e in told if e.type == "response.function_call_arguments.done"]
    for item in whole:
        deltas = [piece.delta for piece in pieces if piece.item_id == item.item_id]
        assert "".join(deltas) == item.arguments
    assert [json.loads(item.arguments) for item in whole] == [{"city": "Oslo"}, {}]
    assert len(pieces) > 4
    assert [event.sequence_number for event in told] == list(range(len(told)))


def test_the_anthropic_sdk_reads_thinking_text_and_tool_use(
    served: tuple[httpx.Client, ScriptedEngine],
) -> None:
    client, _ = served
    with anthropic_sdk(client) as claude:
        answer = claude.messages.create(
            model=MODEL, max_tokens=200, messages=USER, tools=MESSAGES_TOOLS
        )
        with claude.messages.stream(
            model=MODEL, max_tokens=200, messages=USER, tools=MESSAGES_TOOLS
        ) as stream:
            streamed = stream.get_final_message()
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.stop_reason == streamed.stop_reason == "tool_use"
    for message in (answer, streamed):
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == CALLS
    assert [b.type for b in streamed.content] == [b.type for b in answer.content]
    said = [b.model_dump(include={"text", "thinking", "signature"}) for b in answer.content[:2]]
    assert [
        b.model_dump(include={"text", "thinking", "signature"}) for b in streamed.content[:2]
    ] == said


def test_what_the_anthropic_sdk_read_can_be_sent_back_with_results(
    served: tuple[httpx.Client, ScriptedEngine],
) -> None:
    client, engine = served
    with anthropic_sdk(client) as claude:
        answer = claude.messages.create(
            model=MODEL, max_tokens=200, messages=USER, tools=MESSAGES_TOOLS
        )
        results: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "sun"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        turns: Any = [
            *USER,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": results},
        ]
        claude.messages.create(model=MODEL, max_tokens=1, messages=turns, tools=MESSAGES_TOOLS)
    assert len(engine.submits) == 2
    assert len(engine.submits[1].prompt_token_ids) > len(engine.submits[0].prompt_token_ids)


def test_what_the_openai_sdk_read_can_be_sent_back_with_results(
    served: tuple[httpx.Client, ScriptedEngine],
) -> None:
    client, engine = served
    with openai_sdk(client) as openai:
        answer = openai.responses.create(model=MODEL, input=USER, tools=RESPONSES_TOOLS)
        results: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
            for item in answer.output
            if item.type == "function_call"
        ]
        turns: Any = [*USER, *answer.output, *results]
        openai.responses.create(
            model=MODEL, input=turns, tools=RESPONSES_TOOLS, max_output_tokens=1
        )
    assert len(engine.submits) == 2
    assert len(engine.submits[1].prompt_token_ids) > len(engine.submits[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]},
            "tools[0].parameters",
        ),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_tools_that_a_chat_refuses_have_the_name_they_were_sent_with(
    fields: dict[str, Any], field: str, served: tuple[httpx.Client, ScriptedEngine]
) -> None:
    client, _ = served
    body = {"model": MODEL, "input": "x", **fields}
    assert_error(client.post("/v1/responses", json=body), 400, field)


CUT = SAID[: SAID.index("slo")]


def test_a_call_that_was_cut_is_incomplete_in_the_same_way_whole_and_streamed(
    tmp_path: Path,
) -> None:
    with saying(CUT, model_with_template(tmp_path, QWEN3)) as (client, _):
        with openai_sdk(client) as openai:
            asked: Any = {"model": MODEL, "input": USER, "tools": RESPONSES_TOOLS}
            answer = openai.responses.create(**asked)
            *_, last = openai.responses.create(**asked, stream=True)
        with anthropic_sdk(client) as claude:
            wanted: Any = {"model": MODEL, "messages": USER, "tools": MESSAGES_TOOLS}
            message = claude.messages.create(**wanted, max_tokens=200)
            with claude.messages.stream(**wanted, max_tokens=200) as stream:
                streamed = stream.get_final_message()
    assert last.type == "response.completed"
    for output in (answer.output, last.response.output):
        call = output[-1]
        assert call.type == "function_call"
        assert (call.arguments, call.status) == ('{"city": "O', "incomplete")
    for told in (message, streamed):
        block = told.content[-1]
        assert block.type == "tool_use"
        assert (block.name, block.input) == ("weather", {})
        assert told.stop_reason == "end_turn"


def test_the_anthropic_sdk_sees_arguments_grow(served: tuple[httpx.Client, ScriptedEngine]) -> None:
    client, _ = served
    with (
        anthropic_sdk(client) as claude,
        claude.messages.stream(
            model=MODEL, max_tokens=200, messages=USER, tools=MESSAGES_TOOLS
        ) as stream,
    ):
        told = list(stream)
    pieces = [event.partial_json for event in told if event.type == "input_json"]
    assert "".join(pieces) == '{"city": "Oslo"}{}'
    assert len(pieces) > 4
    kinds = [event.type for event in told if event.type.startswith("content_block_st")]
    assert kinds == ["content_block_start", "content_block_stop"] * 4
