"""Calls that a real model has to make, over HTTP at two ranks: as asked for, and the same however they are computed."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.helpers.http_cell import MODEL, CellClients, cell_clients
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "maxItems": 2,
        },
        "unit": {"enum": ["°C", "°F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "count": NUMBER}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
MESSAGES: Any = [
    {"role": "user", "content": "Once upon a time there was a dog who liked the rain."}
]
ANY: Any = {"type": "any", "disable_parallel_tool_use": True}
NAMED: Any = {"type": "function", "function": {"name": "count"}}


@pytest.fixture(scope="module")
def cell() -> Iterator[CellClients]:
    with cell_clients(DEMO_MODEL_DIR, ep_size=2, deterministic=True) as clients:
        yield clients


@pytest.fixture(scope="module")
def openai(cell: CellClients) -> Iterator[OpenAI]:
    base_url = str(cell.api.base_url.join("/v1"))
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as openai:
        yield openai


@pytest.fixture(scope="module")
def claude(cell: CellClients) -> Iterator[Anthropic]:
    with Anthropic(base_url=str(cell.api.base_url), api_key="none", max_retries=0) as claude:
        yield claude


def assert_matches(name: str, arguments: object) -> None:
    assert jsonschema_rs.validator_for(SCHEMAS[name]).is_valid(arguments)


def test_a_forced_call_is_the_same_cold_cached_and_replayed(cell: CellClients) -> None:
    body = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "return_token_ids": True,
        "temperature": 1,
        "seed": 7,
    }

    def asked() -> tuple[list[int], dict[str, Any], dict[str, int]]:
        answer = cell.api.post("/v1/chat/completions", json=body).json()
        (told,) = answer["choices"]
        (call,) = told["message"]["tool_calls"]
        assert told["finish_reason"] == "tool_calls"
        return told["token_ids"], call["function"], answer["usage"]["prompt_tokens_details"]

    cold, function, first = asked()
    cached, _, second = asked()
    assert cell.admin.post("/admin/evict", json={"part": "kv"}).is_success
    replayed, _, third = asked()
    assert (first["cached_tokens"], first["replayed_tokens"]) == (0, 0)
    assert second["cached_tokens"] > 0
    assert third["replayed_tokens"] > 0
    assert cold == cached == replayed
    assert_matches(function["name"], json.loads(function["arguments"]))


def test_a_model_that_would_not_call_does_so_when_it_has_to_whole_and_streamed(
    openai: OpenAI,
) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
    free = openai.chat.completions.create(**asked, max_tokens=4)
    assert not free.choices[0].message.tool_calls
    forced = openai.chat.completions.create(**asked, tool_choice=NAMED)
    with openai.chat.completions.stream(**asked, tool_choice=NAMED) as stream:
        streamed = stream.get_final_completion()
    (call,) = forced.choices[0].message.tool_calls or []
    (same,) = streamed.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == same.function.name == "count"
    assert call.function.arguments == same.function.arguments
    assert_matches("count", json.loads(call.function.arguments))


def test_the_anthropic_sdk_gets_a_call_and_an_answer_of_a_format(claude: Anthropic) -> None:
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    greedy = {"temperature": 0}
    asked: Any = {"model": MODEL, "max_tokens": 200, "messages": MESSAGES, "extra_body": greedy}
    called = claude.messages.create(**asked, tools=tools, tool_choice=ANY)
    (block,) = called.content
    assert block.type == "tool_use"
    assert called.stop_reason == "tool_use"
    assert_matches(block.name, block.input)
    config: Any = {"format": {"type": "json_schema", "schema": NUMBER}}
    formatted = claude.messages.create(**asked, output_config=config)
    (text,) = formatted.content
    assert text.type == "text"
    assert_matches("count", json.loads(text.text))
