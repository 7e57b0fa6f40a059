"""Tools of a chat: what reaches the model, and its calls in whole and streamed answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.helpers.chat_templates import NAMED
from tests.helpers.scripted_engine import ScriptedEngine, wait_until
from tests.router_service.http.helpers import (
    CHAT,
    CODEC,
    MODEL,
    assert_error,
    assert_serves,
    chat_body,
    events,
    model_with_template,
    running_server,
    tokens,
)

EOS = 2
USER = {"role": "user", "content": "How is the weather?"}
ARGUMENTS = '{"city": "Málaga 🙂", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NO_ARGUMENTS = '<tool_call>\n{"name": "now"}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
    "required": ["city"],
}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = [tool("get_weather", description="Forecast", parameters=SCHEMA), tool("now")]


def tools_body(**fields: Any) -> dict[str, Any]:
    return chat_body(**{"messages": [USER], "tools": TOOLS, **fields})


@contextmanager
def saying(text: str, *, tokens_per_step: int = 1, **options: Any) -> Iterator[httpx.Client]:
    """A server whose model answers this to everybody, and then ends its turn."""
    ids = [*tokens(text), EOS]
    with (
        ScriptedEngine(token_ids=ids, tokens_per_step=tokens_per_step) as engine,
        running_server(engine, **options) as (client, _),
    ):
        yield client


def whole(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(CHAT, json=tools_body(**fields))
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def streamed(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    """The choice that the deltas of a stream add up to, in the shape of a whole one."""
    chunks = events(client.post(CHAT, json=tools_body(stream=True, **fields)))
    message: dict[str, Any] = {"content": None}
    finish_reason = None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        finish_reason = choice["finish_reason"] or finish_reason
        _add(message, choice["delta"])
    return {"message": message, "finish_reason": finish_reason}


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta.get("content") is not None:
        message["content"] = (message["content"] or "") + delta["content"]
    for part in delta.get("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if part["index"] == len(calls):
            calls.append({key: part[key] for key in ("id", "type", "function")})
        else:
            assert set(part) == {"index", "function"}
            assert set(part["function"]) == {"arguments"}
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def functions(choice: dict[str, Any]) -> list[tuple[str, str]]:
    calls = choice["message"].get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"] for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("answer", [whole, streamed])
def test_a_call_is_told_with_its_arguments_and_no_content(answer: Any) -> None:
    with saying(CALL) as client:
        choice = answer(client)
    assert functions(choice) == [("get_weather", ARGUMENTS)]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("tokens_per_step", [1, 5, 200])
@pytest.mark.parametrize("answer", [whole, streamed])
def test_text_and_two_calls_are_told_in_order_however_many_tokens_come_at_once(
    answer: Any, tokens_per_step: int
) -> None:
    with saying(f"I look.\n{CALL}\n{NO_ARGUMENTS}", tokens_per_step=tokens_per_step) as client:
        choice = answer(client)
    assert functions(choice) == [("get_weather", ARGUMENTS), ("now", "{}")]
    assert choice["message"]["content"] == "I look."
    assert choice["finish_reason"] == "tool_calls"


NO_CALLS = [
    "Use <tool_call> for calls.",
    CALL.replace('{"city"', "{city"),
    CALL.replace("get_weather", "no_such_tool"),
    CALL[:40],
]


@pytest.mark.parametrize("text", NO_CALLS)
@pytest.mark.parametrize("answer", [whole, streamed])
def test_what_is_no_call_is_content(answer: Any, text: str) -> None:
    with saying(text) as client:
        choice = answer(client)
    assert choice["message"]["content"] == text
    assert functions(choice) == []
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("answer", [whole, streamed])
def test_a_call_that_breaks_is_as_far_as_it_came_and_the_rest_is_content(answer: Any) -> None:
    with saying(CALL.replace("[1, 2]", "[1, 2")) as client:
        choice = answer(client)
    assert functions(choice) == [("get_weather", ARGUMENTS.partition("]")[0])]
    assert choice["message"]["content"] == "}}\n</tool_call>"
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("answer", [whole, streamed])
def test_a_call_that_the_limit_cuts_is_as_far_as_it_came(answer: Any) -> None:
    text = CALL + CALL
    with saying(text) as client:
        choice = answer(client, max_tokens=len(tokens(text)) - 8)
    first, second = functions(choice)
    assert first == ("get_weather", ARGUMENTS)
    assert second[0] == "get_weather"
    assert 0 < len(second[1]) < len(ARGUMENTS)
    assert ARGUMENTS.startswith(second[1])
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("answer", [whole, streamed])
def test_a_stop_string_within_a_call_ends_the_answer_and_nothing_of_it_is_told(answer: Any) -> None:
    with saying(CALL) as client:
        choice = answer(client, stop=["laga"])
    assert functions(choice) == [("get_weather", ARGUMENTS[: ARGUMENTS.index("laga")])]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "stop"


def test_arguments_are_streamed_as_they_are_generated() -> None:
    with saying(CALL) as client:
        chunks = events(client.post(CHAT, json=tools_body(stream=True)))
    calls = [c["choices"][0]["delta"].get("tool_calls", []) for c in chunks]
    (first, *others) = [part for parts in calls for part in parts]
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    pieces = [part["function"]["arguments"] for part in others]
    assert "".join(pieces) == ARGUMENTS
    assert len(pieces) > len(tokens(ARGUMENTS)) / 2
    assert all(pieces)


@pytest.mark.parametrize("answer", [whole, streamed])
def test_calls_of_strict_functions_are_told_when_they_are_known_to_match(answer: Any) -> None:
    strict = [tool("get_weather", parameters=SCHEMA, strict=True)]
    with saying(CALL) as client:
        complete = answer(client, tools=strict)
        cut = answer(client, tools=strict, max_tokens=len(tokens(CALL)) - 8)
    assert functions(complete) == [("get_weather", ARGUMENTS)]
    assert functions(cut) == []
    assert CALL.startswith(cut["message"]["content"])


@pytest.mark.parametrize("answer", [whole, streamed])
def test_a_stop_string_after_a_call_leaves_it_a_call(answer: Any) -> None:
    with saying(CALL + " And END of it") as client:
        choice = answer(client, stop=["END"])
    assert functions(choice) == [("get_weather", ARGUMENTS)]
    assert choice["message"]["content"] == " And "
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("answer", [whole, streamed])
def test_without_parallel_calls_the_answer_ends_with_its_first_call(answer: Any) -> None:
    ids = [*tokens(CALL + NO_ARGUMENTS), EOS]
    with ScriptedEngine(token_ids=ids) as engine, running_server(engine) as (client, _):
        choice = answer(client, parallel_tool_calls=False)
        assert functions(choice) == [("get_weather", ARGUMENTS)]
        assert choice["finish_reason"] == "tool_calls"
        wait_until(lambda: bool(engine.finishes))
        assert [finish.num_output_tokens for finish in engine.finishes] == [len(tokens(CALL))]
        usage = client.post(CHAT, json=tools_body(parallel_tool_calls=False)).json()["usage"]
        assert usage["completion_tokens"] == len(tokens(CALL))


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_and_log_probs_cover_every_token_of_an_answer_with_calls(stream: bool) -> None:
    text = f"I look.\n{CALL}\n{NO_ARGUMENTS}"
    fields = {"logprobs": True, "return_token_ids": True, "stream": stream}
    with saying(text) as client:
        response = client.post(CHAT, json=tools_body(**fields))
    choices = [c["choices"][0] for c in events(response)] if stream else response.json()["choices"]
    ids = [i for choice in choices for i in choice.get("token_ids", [])]
    entries = [e for choice in choices for e in (choice["logprobs"] or {"content": []})["content"]]
    assert ids == [*tokens(text), EOS]
    assert [bytes(entry["bytes"]) for entry in entries] == [CODEC.token_bytes(i) for i in ids]


def test_choices_have_calls_of_their_own() -> None:
    ids = {0: [*tokens(CALL), EOS], 1: [*tokens("No."), EOS]}
    with (
        ScriptedEngine(choice_answers=ids) as engine,
        running_server(engine) as (client, _),
    ):
        choices = client.post(CHAT, json=tools_body(n=2)).json()["choices"]
    assert [functions(choice) for choice in choices] == [[("get_weather", ARGUMENTS)], []]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop"]
    assert choices[1]["message"]["content"] == "No."


def test_the_sdk_reads_a_stream_of_calls() -> None:
    with saying(f"I look.\n{CALL}\n{NO_ARGUMENTS}") as client:
        base_url = f"{client.base_url}/v1".replace("//v1", "/v1")
        with (
            OpenAI(base_url=base_url, api_key="none", max_retries=0) as openai,
            openai.chat.completions.stream(model=MODEL, messages=[USER], tools=TOOLS) as stream,
        ):
            seen = [event.type for event in stream]
            message = stream.get_final_completion().choices[0].message
    assert seen.count("tool_calls.function.arguments.done") == 2
    assert message.content == "I look."
    assert message.tool_calls is not None
    assert [c.function.arguments for c in message.tool_calls] == [ARGUMENTS, "{}"]
    assert [c.function.name for c in message.tool_calls] == ["get_weather", "now"]


def test_the_sdk_parses_arguments_of_strict_functions() -> None:
    strict = [tool("get_weather", parameters=SCHEMA, strict=True)]
    with saying(CALL) as client:
        base_url = f"{client.base_url}/v1".replace("//v1", "/v1")
        with OpenAI(base_url=base_url, api_key="none", max_retries=0) as openai:
            answer = openai.chat.completions.parse(model=MODEL, messages=[USER], tools=strict)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == json.loads(ARGUMENTS)


@pytest.mark.parametrize("strict", [True, False])
def test_a_call_that_breaks_the_schema_of_a_strict_function_is_content(strict: bool) -> None:
    text = CALL.replace('"city"', '"town"')
    tools = [tool("get_weather", parameters=SCHEMA, strict=strict)]
    with saying(text) as client:
        response = client.post(CHAT, json=chat_body(messages=[USER], tools=tools))
    message = response.json()["choices"][0]["message"]
    assert message["content"] == (text if strict else None)


def test_a_turn_with_calls_is_accepted_back_and_makes_the_same_prompt() -> None:
    with saying(CALL) as client:
        body = tools_body(return_token_ids=True)
        first = client.post(CHAT, json=body).json()
        message = first["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sun"}
        second = client.post(CHAT, json={**body, "messages": [USER, message, result]}).json()
    before = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(before)] == before


def test_tools_reach_the_model_in_its_template() -> None:
    with saying("No.") as client:
        body = tools_body(return_token_ids=True)
        ids = client.post(CHAT, json=body).json()["prompt_token_ids"]
    detokenizer = CODEC.detokenizer()
    text = "".join(map(detokenizer.add, ids))
    shown = {"name": "get_weather", "description": "Forecast", "parameters": SCHEMA}
    assert json.dumps(shown) in text
    assert '{"name": "now", "parameters": {"type": "object", "properties": {}}}' in text


def test_with_tool_choice_none_the_model_is_not_told_of_tools_and_nothing_is_a_call() -> None:
    with saying("a " + CALL) as client:
        fields: dict[str, Any] = {"messages": [USER], "return_token_ids": True}
        plain = client.post(CHAT, json=chat_body(**fields)).json()
        none = client.post(CHAT, json=chat_body(**fields, tools=TOOLS, tool_choice="none")).json()
    assert none["prompt_token_ids"] == plain["prompt_token_ids"]
    assert none["choices"] == plain["choices"]


def test_tool_choice_auto_is_the_default() -> None:
    with saying(CALL) as client:
        assert functions(whole(client, tool_choice="auto")) == functions(whole(client))


NAMED_CHOICE = {"type": "function", "function": {"name": "now"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("a\n")]}, "tools[0].function.name"),
    ({"tools": [tool("a" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool("a"), tool("a")]}, "tools"),
    ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool("a", returns={})]}, "tools[0].function.returns"),
    ({"tools": [tool("a", parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool("a", parameters={"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [tool("a", parameters={"type": "notatype"})]}, "tools[0].function.parameters"),
    (
        {"tools": [TOOLS[0], tool("a", parameters={"properties": {"b": {"type": "text"}}})]},
        "tools[1].function.parameters",
    ),
    (
        {"tools": [tool("a", parameters={"$ref": "http://127.0.0.1:9/x"})]},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [tool("a", parameters={"$ref": "file:///etc/passwd"})]},
        "tools[0].function.parameters",
    ),
    ({"tools": [tool("a", parameters={"$ref": "#/nowhere"})]}, "tools[0].function.parameters"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {**NAMED_CHOICE, "x": 1}}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
    ),
    ({"tools": [], "tool_choice": "auto"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOLS[0], TOOLS[0]], "tool_choice": "required"}, "tools"),
    ({"tool_choice": NAMED_CHOICE}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "field"), REFUSED)
def test_tools_that_cannot_be_served_are_refused_by_place(
    fields: dict[str, Any], field: str, stream: bool, client: httpx.Client
) -> None:
    assert_error(client.post(CHAT, json=chat_body(stream=stream, **fields)), 400, field)


@pytest.mark.parametrize("depth", [100, 240, 500])
def test_a_deep_schema_is_served_or_refused(depth: int, client: httpx.Client) -> None:
    schema = '{"properties": {"a": ' * depth + "{}" + "}}" * depth
    offered = f'[{{"type": "function", "function": {{"name": "a", "parameters": {schema}}}}}]'
    content = json.dumps(chat_body())[:-1] + f', "tools": {offered}}}'
    assert client.post(CHAT, content=content).status_code in (200, 400)
    assert_serves(client)


def test_a_template_that_does_not_show_tools_refuses_them(tmp_path: Path) -> None:
    with saying("x", model_dir=model_with_template(tmp_path, NAMED)) as client:
        assert_error(client.post(CHAT, json=tools_body()), 400, "tools")
        assert client.post(CHAT, json=tools_body(tool_choice="none")).status_code == 200
