"""What agents ask of the openai SDK for Python: tools, reasoning, answers of a schema, and the Responses API."""

import json
from collections.abc import Iterable
from typing import Any, Literal

from checking import Json, LeftOut, Server, same, some
from openai.types.chat import ChatCompletionMessage
from openai_client import client_of, finish_reasons, nameless
from pydantic import BaseModel, ConfigDict
from questions import (
    CALLING,
    CAPITAL,
    CAPITAL_SCHEMA,
    CHAT_PATH,
    NOT_CALLING,
    REASONING,
    RESPONSE,
    RESPONSES_PATH,
    TOOL,
    TOOL_CHAT,
)


class Capital(BaseModel):
    """CAPITAL_SCHEMA, as users of the SDK write it."""

    model_config = ConfigDict(extra="forbid")
    capital: Literal["Oslo", "Paris", "Rome"]
    coastal: bool


def called(message: Json) -> Json:
    """The function of its one call. Raises LeftOut where the model has called none."""
    if not message.get("tool_calls"):
        raise LeftOut("this model does not call the tool")
    (call,) = message["tool_calls"]
    function: Json = call["function"]
    return function


def tools(server: Server) -> None:
    """A call, whole and streamed, and the turn after it."""
    client = client_of(server)
    wanted = server.settled(CHAT_PATH, **TOOL_CHAT)
    (choice,) = wanted["choices"]
    function = called(choice["message"])
    answer = client.chat.completions.create(model=server.model, **TOOL_CHAT)
    same(nameless(answer.model_dump(exclude_unset=True)), nameless(wanted), "the body")
    same(json.loads(function["arguments"]), {"city": "Paris"}, "the arguments")
    chunks = list(client.chat.completions.create(model=server.model, **TOOL_CHAT, stream=True))
    same(joined_call(chunks), {"index": 0, "type": "function", **function}, "the streamed call")
    same(finish_reasons(chunks), ["tool_calls"], "what ends it")
    next_turn(server, answer.choices[0].message)


def joined_call(chunks: Iterable[Any]) -> Json:
    """Of one call: id and name come once, the arguments in pieces."""
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    some(deltas, "deltas of a call")
    same([bool(delta.id) for delta in deltas], [True] + [False] * (len(deltas) - 1), "the ids")
    return {
        "index": deltas[0].index,
        "type": deltas[0].type,
        "name": "".join(delta.function.name or "" for delta in deltas),
        "arguments": "".join(delta.function.arguments or "" for delta in deltas),
    }


def next_turn(server: Server, message: ChatCompletionMessage) -> None:
    """What came goes back as it is, with the tool's result."""
    (call,) = message.tool_calls or []
    told = message.model_dump(exclude_unset=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 20 degrees."}
    asked = {**TOOL_CHAT, "messages": [*TOOL_CHAT["messages"], told, result]}
    wanted = server.settled(CHAT_PATH, **asked)["choices"][0]
    sent: dict[str, Any] = {**asked, "messages": [*TOOL_CHAT["messages"], message, result]}
    answer = client_of(server).chat.completions.create(model=server.model, **sent)
    got = answer.choices[0].model_dump(exclude_unset=True)
    same(nameless(got), nameless(wanted), "the answer to the result")


def tools_not_called(server: Server) -> None:
    asked = {**TOOL_CHAT, "messages": [{"role": "user", "content": NOT_CALLING}]}
    wanted = server.settled(CHAT_PATH, **asked)["choices"][0]
    if wanted["message"].get("tool_calls"):
        raise LeftOut("this model calls the tool")
    chunks = list(
        client_of(server).chat.completions.create(model=server.model, **asked, stream=True)
    )
    same([c for c in chunks if c.choices[0].delta.tool_calls], [], "deltas of calls")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    same(text, wanted["message"]["content"], "the joined text")
    same(finish_reasons(chunks), [wanted["finish_reason"]], "what ends it")


def tools_helper(server: Server) -> None:
    """The SDK joins the call itself and reads its arguments by the schema."""
    function = called(server.settled(CHAT_PATH, **TOOL_CHAT)["choices"][0]["message"])
    with client_of(server).chat.completions.stream(model=server.model, **TOOL_CHAT) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    same(kinds.count("tool_calls.function.arguments.done"), 1, "the number of calls done")
    (call,) = final.choices[0].message.tool_calls or []
    same(call.function.name, function["name"], "the name")
    same(call.function.arguments, function["arguments"], "the arguments")
    same(call.function.parsed_arguments, json.loads(function["arguments"]), "the parsed ones")


def reasoning(server: Server) -> None:
    wanted = server.settled(CHAT_PATH, **REASONING)
    (choice,) = wanted["choices"]
    if not choice["message"].get("reasoning_content"):
        raise LeftOut("this server tells no reasoning apart")
    ours = ("continue_final_message", "add_generation_prompt")
    asked = {name: value for name, value in REASONING.items() if name not in ours}
    extra = {name: REASONING[name] for name in ours}
    create = client_of(server).chat.completions.create
    answer = create(model=server.model, **asked, extra_body=extra)
    same(nameless(answer.model_dump(exclude_unset=True)), nameless(wanted), "the body")
    same(answer.choices[0].message.content, None, "the content before the reasoning has ended")
    details = answer.usage.completion_tokens_details
    same(details.reasoning_tokens, answer.usage.completion_tokens, "reasoning_tokens")
    chunks = list(create(model=server.model, **asked, extra_body=extra, stream=True))
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    joined = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    same(joined, choice["message"]["reasoning_content"], "the joined reasoning")
    same("".join(delta["content"] or "" for delta in deltas), "", "the joined content")


def json_schema(server: Server) -> None:
    """As a dictionary, and as a class that the SDK makes a schema of and reads the answer with."""
    client = client_of(server)
    wanted = server.settled(CHAT_PATH, **CAPITAL)
    answer = client.chat.completions.create(model=server.model, **CAPITAL)
    same(nameless(answer.model_dump(exclude_unset=True)), nameless(wanted), "the body")
    content = answer.choices[0].message.content
    same(sorted(json.loads(content)), sorted(CAPITAL_SCHEMA["properties"]), "the keys")
    chunks = list(client.chat.completions.create(model=server.model, **CAPITAL, stream=True))
    same("".join(c.choices[0].delta.content or "" for c in chunks), content, "the joined text")
    asked = {**CAPITAL, "response_format": Capital}
    parsed = client.chat.completions.parse(model=server.model, **asked).choices[0].message.parsed
    same(type(parsed), Capital, "the type of what is parsed")
    with client.chat.completions.stream(model=server.model, **asked) as stream:
        final = stream.get_final_completion()
    same(final.choices[0].message.parsed, parsed, "what is parsed of a stream")


def response(server: Server) -> None:
    client = client_of(server)
    wanted = server.settled(RESPONSES_PATH, **RESPONSE)
    answer = client.responses.create(model=server.model, **RESPONSE)
    some(answer.output_text, "the text")
    same(nameless(answer.model_dump(exclude_unset=True)), nameless(wanted), "the body")
    events = list(client.responses.create(model=server.model, **RESPONSE, stream=True))
    numbers = [event.sequence_number for event in events]
    same(numbers, list(range(len(events))), "the numbers of events")
    joined = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    same(joined, answer.output_text, "the joined text")
    last = events[-1].response.model_dump(exclude_unset=True)
    same(nameless(last), nameless(wanted), "the response in the last event")


def response_helpers(server: Server) -> None:
    client = client_of(server)
    wanted = server.settled(RESPONSES_PATH, **RESPONSE)
    with client.responses.stream(model=server.model, **RESPONSE) as stream:
        kinds = [event.type for event in stream]
        if "response.completed" in kinds:
            text = stream.get_final_response().output_text
            same(text, wanted["output"][0]["content"][0]["text"], "the text")
    some(kinds.count("response.output_text.delta"), "deltas of the text")
    asked = {"input": "What is the capital of Norway?", "max_output_tokens": 300}
    parsed = client.responses.parse(
        model=server.model, **asked, temperature=0.0, text_format=Capital
    )
    same(type(parsed.output_parsed), Capital, "the type of what is parsed")


def response_tools(server: Server) -> None:
    """A call is an item; items go back as they came, with the tool's result."""
    client = client_of(server)
    asked: dict[str, Any] = {
        "input": [{"role": "user", "content": CALLING}],
        "tools": [{"type": "function", **TOOL}],
        "temperature": 0.0,
        "max_output_tokens": 60,
    }
    answer = client.responses.create(model=server.model, **asked)
    calls = [item for item in answer.output if item.type == "function_call"]
    if not calls:
        raise LeftOut("this model does not call the tool")
    (call,) = calls
    same((call.name, json.loads(call.arguments)), (TOOL["name"], {"city": "Paris"}), "the call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    asked["input"] = [*asked["input"], *answer.output, result]
    again = client.responses.create(model=server.model, **asked)
    same([item.type for item in again.output], ["message"], "what the result is answered with")
    some(again.output_text, "the text")


CHECKS = [
    ("tools", tools),
    ("tools not called", tools_not_called),
    ("tools, stream helper", tools_helper),
    ("reasoning", reasoning),
    ("json_schema, parse", json_schema),
    ("responses", response),
    ("responses, helpers", response_helpers),
    ("responses, tools", response_tools),
]
