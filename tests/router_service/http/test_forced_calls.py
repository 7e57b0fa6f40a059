"""tool_choice "required" or a function: what the engine is told, what is refused, how such answers end, by all APIs."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.grammar import grammar_text
from router_service.call_grammar import CallGrammar
from router_service.chat_template import load_chat_template
from router_service.model_parsers import BY_TEMPLATE, choose_parsers
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    CODEC,
    DEMO_MODEL,
    MODEL,
    assert_error,
    chat_body,
    events,
    running_server,
    tokens,
)

Served = tuple[httpx.Client, ScriptedEngine]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
UNTYPED = {"properties": {"n": {"type": "integer"}}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BOMB = {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(30)]}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("weather", parameters=CITY), tool("now"), tool("count", parameters=UNTYPED)]
SCHEMAS = {"weather": CITY, "now": NOTHING, "count": {"type": "object", **UNTYPED}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One server for all, so that its process for grammars starts once. Its model calls `weather` twice."""
    ids = [*tokens(CALL + CALL), 2]
    with ScriptedEngine(token_ids=ids) as engine, running_server(engine) as (client, _):
        yield client, engine


def body(**fields: Any) -> dict[str, Any]:
    return chat_body(tools=TOOLS, **fields)


def grammar_of(names: list[str], *, is_repeated: bool) -> str:
    layout = choose_parsers(BY_TEMPLATE, load_chat_template(DEMO_MODEL)).call_layout
    assert layout is not None
    grammar = CallGrammar(layout, CODEC.added_token_ids, None)
    schemas = {name: SCHEMAS[name] for name in names}
    return grammar_text("lark", grammar.text(schemas, is_repeated=is_repeated))


@pytest.mark.parametrize(
    ("fields", "names", "is_repeated"),
    [
        ({"tool_choice": "required"}, list(SCHEMAS), True),
        ({"tool_choice": "required", "parallel_tool_calls": True}, list(SCHEMAS), True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, list(SCHEMAS), False),
        ({"tool_choice": named("weather")}, ["weather"], False),
        ({"tool_choice": named("now"), "parallel_tool_calls": True}, ["now"], False),
    ],
    ids=str,
)
def test_the_grammar_of_the_calls_reaches_the_engine(
    fields: dict[str, Any], names: list[str], is_repeated: bool, served: Served
) -> None:
    client, engine = served
    response = client.post(CHAT, json=body(**fields))
    assert response.status_code == 200, response.text
    expected = grammar_of(names, is_repeated=is_repeated)
    assert engine.submits[-1].sampling.rules.grammar == expected


def test_prompts_are_those_of_a_call_that_is_not_forced(served: Served) -> None:
    client, engine = served
    for choice in ("auto", "required", named("now")):
        client.post(CHAT, json=body(tool_choice=choice, max_tokens=1))
    prompts = [submit.prompt_token_ids.tolist() for submit in engine.submits[-3:]]
    assert prompts[0] == prompts[1] == prompts[2]
    assert engine.submits[-3].sampling.rules.grammar is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "num_calls", "reason"),
    [
        ({"tool_choice": "required"}, 2, "tool_calls"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, 1, "tool_calls"),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, 1, "tool_calls"),
        ({"tool_choice": named("weather")}, 1, "stop"),
    ],
    ids=str,
)
def test_an_answer_has_as_many_calls_as_were_asked_for_and_ends_as_openais(
    fields: dict[str, Any], num_calls: int, reason: str, stream: bool, served: Served
) -> None:
    response = served[0].post(CHAT, json=body(stream=stream, **fields))
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response)]
        parts = [part for choice in choices for part in choice["delta"].get("tool_calls", [])]
        found = sum("id" in part for part in parts)
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    else:
        (choice,) = response.json()["choices"]
        found, reasons = len(choice["message"]["tool_calls"]), [choice["finish_reason"]]
        assert choice["message"]["content"] is None
    assert (found, reasons) == (num_calls, [reason])


REQUIRED = {"tool_choice": "required"}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_arguments_of_a_strict_function_are_streamed_where_a_grammar_keeps_its_schema(
    choice: str, served: Served
) -> None:
    tools = [tool("weather", parameters=CITY, strict=True)]
    response = served[0].post(CHAT, json={**body(stream=True, tool_choice=choice), "tools": tools})
    deltas = [chunk["choices"][0]["delta"] for chunk in events(response)]
    parts = [part for delta in deltas for part in delta.get("tool_calls", []) if "id" not in part]
    assert (len(parts) > 2) == (choice == "required")
    assert "".join(p["function"]["arguments"] for p in parts) == '{"city": "Oslo"}' * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({**REQUIRED, "tools": None}, "tool_choice", ["required", "send some"]),
        ({**REQUIRED, "tools": []}, "tool_choice", ["required", "send some"]),
        ({"tool_choice": named("f")}, "tool_choice", ["f", "name one"]),
        ({**REQUIRED, "tools": [TOOLS[0], TOOLS[0]]}, "tools", ["weather"]),
        (
            {**REQUIRED, "response_format": {"type": "json_object"}},
            "tools",
            ["response_format", "one of them"],
        ),
        ({**REQUIRED, "guided_regex": "a"}, "tools", ["guided_regex"]),
        ({**REQUIRED, "ignore_eos": True}, "ignore_eos", ["tool_choice"]),
        ({**REQUIRED, "bad_words": ["x"]}, "bad_words", ["tool_choice"]),
        ({"tool_choice": named("now"), "allowed_token_ids": [5]}, "allowed_token_ids", []),
        (
            {**REQUIRED, "tools": [*TOOLS, tool("f", parameters={"not": {"required": ["a"]}})]},
            "tools[3].function.parameters",
            ["not", "auto"],
        ),
        (
            {**REQUIRED, "tools": [tool("f", parameters={"x-guidance": {"lenient": True}})]},
            "tools[0].function.parameters",
            ["x-guidance"],
        ),
        (
            {**REQUIRED, "tools": [tool("f", parameters={"title": "x" * 66_000})]},
            "tools",
            ["65536", "auto"],
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_forced_is_refused_by_name(
    fields: dict[str, Any], field: str, words: list[str], stream: bool, served: Served
) -> None:
    response = served[0].post(CHAT, json={**body(stream=stream), **fields})
    assert_error(response, 400, field)
    message = response.json()["error"]["message"]
    assert [word for word in words if word not in message] == []
    assert len(message) < 500


def test_schemas_that_take_too_long_are_refused_together(served: Served) -> None:
    tools = [*TOOLS, tool("f", parameters={"properties": {"a": BOMB}})]
    response = served[0].post(CHAT, json={**body(**REQUIRED), "tools": tools})
    assert_error(response, 400, "tools")
    assert "takes over 0.5 s to compile" in response.json()["error"]["message"]


def test_a_schema_of_a_function_that_is_not_named_is_no_reason_to_refuse(served: Served) -> None:
    tools = [*TOOLS, tool("f", parameters={"not": {"required": ["a"]}})]
    for choice in (named("now"), "auto"):
        response = served[0].post(CHAT, json={**body(tool_choice=choice), "tools": tools})
        assert response.status_code == 200, response.text


RESPONSES_TOOLS = [{"type": "function", **entry["function"]} for entry in TOOLS]
MESSAGES_TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "input_schema": CITY},
    {"name": "now", "input_schema": NOTHING},
    {"name": "count", "input_schema": {"type": "object", **UNTYPED}},
]


def responses_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hello", "tools": RESPONSES_TOOLS, **fields}


def messages_body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {
        "model": MODEL,
        "max_tokens": 99,
        "messages": messages,
        "tools": MESSAGES_TOOLS,
        **fields,
    }


@pytest.mark.parametrize(
    ("fields", "names", "is_repeated"),
    [
        ({"tool_choice": "required"}, list(SCHEMAS), True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, list(SCHEMAS), False),
        ({"tool_choice": {"type": "function", "name": "now"}}, ["now"], False),
    ],
    ids=str,
)
def test_a_response_forces_calls_as_a_chat_does(
    fields: dict[str, Any], names: list[str], is_repeated: bool, served: Served
) -> None:
    client, engine = served
    response = client.post("/v1/responses", json=responses_body(**fields))
    assert response.status_code == 200, response.text
    assert response.json()["tool_choice"] == fields["tool_choice"]
    assert response.json()["status"] == "completed"
    expected = grammar_of(names, is_repeated=is_repeated)
    assert engine.submits[-1].sampling.rules.grammar == expected


@pytest.mark.parametrize(
    ("choice", "names", "is_repeated"),
    [
        ({"type": "any"}, list(SCHEMAS), True),
        ({"type": "any", "disable_parallel_tool_use": True}, list(SCHEMAS), False),
        ({"type": "tool", "name": "weather"}, ["weather"], False),
    ],
    ids=str,
)
def test_a_message_forces_calls_as_a_chat_does_and_stops_for_them(
    choice: dict[str, Any], names: list[str], is_repeated: bool, served: Served
) -> None:
    client, engine = served
    response = client.post("/v1/messages", json=messages_body(tool_choice=choice))
    assert response.status_code == 200, response.text
    assert response.json()["stop_reason"] == "tool_use"
    assert {block["type"] for block in response.json()["content"]} == {"tool_use"}
    expected = grammar_of(names, is_repeated=is_repeated)
    assert engine.submits[-1].sampling.rules.grammar == expected


def test_a_message_of_a_format_is_held_to_its_schema(served: Served) -> None:
    client, engine = served
    config = {"format": {"type": "json_schema", "schema": CITY}}
    fields = {"tools": None, "output_config": config}
    response = client.post("/v1/messages", json=messages_body(**fields))
    assert response.status_code == 200, response.text
    expected = grammar_text("json", json.dumps(CITY, separators=(",", ":")))
    assert engine.submits[-1].sampling.rules.grammar == expected
    for config in ({}, {"format": None}, {"effort": None}):
        assert client.post("/v1/messages", json=messages_body(output_config=config)).is_success
        assert engine.submits[-1].sampling.rules.grammar is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any", "name": "now"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}, "tools": None}, "tool_choice"),
        (
            {
                "tool_choice": {"type": "any"},
                "tools": [{"name": "f", "input_schema": {"uniqueItems": True}}],
            },
            "tools[0].input_schema",
        ),
        ({"output_config": {"format": {"type": "json"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        (
            {
                "output_config": {
                    "format": {"type": "json_schema", "schema": {"type": "notatype"}}
                },
                "tools": None,
            },
            "output_config.format.schema",
        ),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "tools"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_message_that_cannot_be_honoured_is_refused_by_the_name_it_was_sent_with(
    fields: dict[str, Any], field: str, served: Served
) -> None:
    response = served[0].post("/v1/messages", json=messages_body(**fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(f"{field}: ")


def test_a_response_that_cannot_be_forced_is_refused_by_the_name_it_was_sent_with(
    served: Served,
) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"uniqueItems": True}}]
    json_body = responses_body(tools=tools, tool_choice="required")
    assert_error(served[0].post("/v1/responses", json=json_body), 400, "tools[0].parameters")
