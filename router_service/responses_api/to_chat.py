"""From a body of /v1/responses to the chat that it stands for. Pure."""

from typing import Any

from router_service.field_names import FieldNames
from router_service.responses_api.body import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    MessageItem,
    NamedFunction,
    ReasoningItem,
    ResponsesBody,
    TextPart,
)
from router_service.translated_chat import ChatTurns, TranslatedChat

Json = dict[str, Any]


def chat_of(body: ResponsesBody, passed: Json) -> TranslatedChat:
    """passed: the fields that are the chat's."""
    turns = ChatTurns()
    if body.instructions is not None:
        turns.add({"role": "system", "content": body.instructions}, "instructions")
        turns.name(".content", "instructions")
    if isinstance(body.input, str):
        turns.add({"role": "user", "content": body.input}, "input")
        turns.name(".content", "input")
    else:
        for index, item in enumerate(body.input):
            _add_item(turns, item, f"input[{index}]")
    fields, names = _fields(body)
    json = {**passed, "messages": turns.messages, **fields}
    return TranslatedChat(json, FieldNames({**_NAMES, **turns.names, **names}))


_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}


def _add_item(
    turns: ChatTurns,
    item: MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem,
    place: str,
) -> None:
    match item:
        case MessageItem():
            _add_message(turns, item, place)
        case FunctionCallItem():
            function = {"name": item.name, "arguments": item.arguments}
            turns.call(item.call_id, function, place, f"{place}.call_id")
        case FunctionCallOutputItem():
            output = {"role": "tool", "tool_call_id": item.call_id, "content": _parts(item.output)}
            turns.add(output, place)
            turns.name(".content", f"{place}.output")
            turns.name(".tool_call_id", f"{place}.call_id")
        case ReasoningItem():
            text = "\n".join(part.text for part in item.content or ())
            turns.add({"role": "assistant", "reasoning_content": text or None}, place)
            turns.name(".reasoning_content", f"{place}.content")


def _add_message(turns: ChatTurns, item: MessageItem, place: str) -> None:
    answer = turns.last_of("assistant") if item.role == "assistant" else None
    if answer is None or "content" in answer or "tool_calls" in answer:
        turns.add({"role": item.role, "content": _parts(item.content)}, place)
    else:
        answer["content"] = _parts(item.content)
        turns.name(".content", f"{place}.content")


def _parts(content: str | list[TextPart]) -> str | list[Json]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _fields(body: ResponsesBody) -> tuple[Json, dict[str, str]]:
    """What stands beside the messages, as far as it was given, and where it comes from."""
    text, reasoning = body.text, body.reasoning
    fields = {
        "max_completion_tokens": body.max_output_tokens,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": None if text is None else _response_format(text.format),
        "verbosity": None if text is None else text.verbosity,
        "reasoning_effort": None if reasoning is None else reasoning.effort,
        "logprobs": body.with_logprobs or None,
        "top_logprobs": body.top_logprobs,
    }
    names = {f"tools[{i}].function": f"tools[{i}]" for i in range(len(body.tools or ()))}
    return {name: value for name, value in fields.items() if value is not None}, names


def _tool(tool: FunctionTool) -> Json:
    return {"type": "function", "function": _given(tool)}


def _given(tool: FunctionTool) -> Json:
    fields = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _tool_choice(choice: str | NamedFunction | None) -> Any:
    if isinstance(choice, NamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _response_format(text_format: Json | None) -> Json | None:
    """A schema stands beside its type here and one level deeper in a chat."""
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    schema = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
