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
        "city": {"type": "string", "maxLength": 8},
        "days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "maxItems": 3,
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
}  # fmt: skip
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


@pytest.mark.parametrize(
    ("choice", "sampling"),
    [("required", {"temperature": 0}), (NAMED, {"temperature": 1, "seed": 7})],
    ids=["required, greedy", "named, drawn"],
)
def test_a_forced_call_is_the_same_cold_cached_and_replayed(
    choice: Any, sampling: dict[str, Any], cell: CellClients
) -> None:
    body = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "return_token_ids": True,
        "cache_salt": f"{choice}{sampling}",
        **sampling,
    }

    def asked() -> tuple[list[int], dict[str, Any], dict[str, int]]:
        answer = cell.api.post("/v1/chat/completions", json=body).json()
        (told,) = answer["choices"]
        (call,) = told["message"]["tool_calls"]
        assert told["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
        return told["token_ids"], call["function"], answer["usage"]["prompt_tokens_details"]

    cold, function, first = asked()
    cached, _, second = asked()
    assert cell.admin.post("/admin/evict", json={"part": "kv"}).is_success
    replayed, _, third = asked()
    assert (first["cached_tokens"], first["replayed_tokens"]) == (0, 0)
    assert second["cached_tokens"] > 0
    assert third["replayed_tokens"] > 0
    assert cold == cached == replayed
    assert choice == "required" or function["name"] == "count"
    assert_matches(function["name"], json.loads(function["arguments"]))


def test_a_model_that_would_not_call_does_so_when_it_has_to(openai: OpenAI) -> None:
    free = openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, temperature=0, max_tokens=20
    )
    forced = openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", temperature=0,
        max_tokens=200,
    )  # fmt: skip
    assert not free.choices[0].message.tool_calls
    calls = forced.choices[0].message.tool_calls or []
    assert len(calls) >= 1
    for call in calls:
        assert call.type == "function"
        assert_matches(call.function.name, json.loads(call.function.arguments))


def test_the_anthropic_sdk_gets_a_call_and_an_answer_of_a_format(claude: Anthropic) -> None:
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    called = claude.messages.create(
        model=MODEL, max_tokens=200, messages=MESSAGES, tools=tools, tool_choice=ANY
    )
    (block,) = called.content
    assert block.type == "tool_use"
    assert called.stop_reason == "tool_use"
    assert_matches(block.name, block.input)
    formatted = claude.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=MESSAGES,
        output_config={"format": {"type": "json_schema", "schema": WEATHER}},
    )
    (text,) = formatted.content
    assert text.type == "text"
    assert_matches("get_weather", json.loads(text.text))
