"""From a body of /v1/messages to the chat that it stands for. Pure.

Messages of one role that follow one another are one turn, as Anthropic has it; a chat joins the texts of a turn.
"""

import json
from typing import Any

from router_service.field_names import FieldNames
from router_service.messages_api.body import (
    AssistantMessage,
    MessagesBody,
    OutputConfig,
    PromptBody,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from router_service.translated_chat import ChatTurns, TranslatedChat

Json = dict[str, Any]

_NAMES = {
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
}


def chat_of(body: PromptBody, passed: Json) -> TranslatedChat:
    """passed: the fields that are the chat's."""
    turns = ChatTurns()
    if body.system is not None:
        turns.add({"role": "system", "content": _texts(body.system)}, "system")
        turns.name(".content", "system")
    for index, message in enumerate(body.messages):
        _add_message(turns, message, f"messages[{index}]")
    json_body = {**passed, "messages": turns.messages, **_tools(body), **_answer_fields(body)}
    names = {**_NAMES, **turns.names}
    for index in range(len(body.tools or ())):
        names[f"tools[{index}].function"] = f"tools[{index}]"
        names[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
    if isinstance(body.messages[-1], AssistantMessage):
        json_body |= {"continue_final_message": True, "add_generation_prompt": False}
        last = f"messages[{len(body.messages) - 1}]"
        names |= {"continue_final_message": last, "add_generation_prompt": last}
    return TranslatedChat(json_body, FieldNames(names))


def _add_message(
    turns: ChatTurns, message: UserMessage | AssistantMessage | SystemMessage, place: str
) -> None:
    if isinstance(message, SystemMessage):
        turns.add({"role": "system", "content": _texts(message.content)}, place)
        return
    if isinstance(message.content, str):
        _add_text(turns, message.role, message.content, place, f"{place}.content")
        return
    if not message.content:
        turns.add({"role": message.role, "content": []}, place)
    for index, block in enumerate(message.content):
        _add_block(turns, message.role, block, f"{place}.content[{index}]")


def _add_block(
    turns: ChatTurns,
    role: str,
    block: TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock,
    place: str,
) -> None:
    match block:
        case TextBlock():
            _add_text(turns, role, block.text, place, f"{place}.text")
        case ToolUseBlock():
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            turns.call(block.id, function, place, f"{place}.id")
        case ToolResultBlock():
            content = _result(block)
            turns.add(
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}, place
            )
            turns.name(".tool_call_id", f"{place}.tool_use_id")
        case ThinkingBlock():
            answer = turns.answer(place)
            before = answer.get("reasoning_content")
            answer["reasoning_content"] = "\n".join(filter(None, [before, block.thinking]))
            turns.name(".reasoning_content", f"{place}.thinking")


def _add_text(turns: ChatTurns, role: str, text: str, place: str, sent_as: str) -> None:
    """To the turn that is open, or as a new one."""
    turn = turns.last_of(role)
    if turn is None:
        turn = {"role": role}
        turns.add(turn, place)
    parts = turn.setdefault("content", [])
    parts.append({"type": "text", "text": text})
    turns.name(f".content[{len(parts) - 1}].text", sent_as)


def _result(block: ToolResultBlock) -> list[Json]:
    """A failure is told in words: a chat has no flag for it."""
    failed = [{"type": "text", "text": "Error:"}] if block.is_error else []
    return [*failed, *_texts(block.content or [])]


def _texts(content: str | list[TextBlock]) -> list[Json]:
    texts = [content] if isinstance(content, str) else [block.text for block in content]
    return [{"type": "text", "text": text} for text in texts]


def _tools(body: PromptBody) -> Json:
    fields: Json = {}
    if body.tools is not None:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
        if body.tool_choice.disable_parallel_tool_use is not None:
            fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    return fields


def _tool(tool: Tool) -> Json:
    described = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **described, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _answer_fields(body: PromptBody) -> Json:
    if not isinstance(body, MessagesBody):
        return {}
    fields = {
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "user": None if body.metadata is None else body.metadata.user_id,
        "response_format": None if body.output_config is None else _format(body.output_config),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _format(config: OutputConfig) -> Json | None:
    """A chat wants a name for a schema."""
    if config.format is None:
        return None
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": config.format.schema_},
    }
