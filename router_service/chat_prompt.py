"""The prompt of a chat: its messages through the model's template, as far as the template shows what they hold."""

from typing import Any

from cluster.errors import RequestError
from router_service.chat_messages import (
    AssistantMessage,
    ChatMessage,
    ToolMessage,
    content_text,
    template_message,
)
from router_service.chat_template import ChatTemplate
from router_service.json_body import field_path
from router_service.openai_errors import safe_text
from router_service.protocol import ChatBody
from router_service.template_probes import RenderOptions
from router_service.tool_fields import Tool

_CHARACTERS_OF_TOOLS = 2**16
"""That tools count as: their schemas are checked and written out, and may be of any size."""


def chat_prompt(body: ChatBody, template: ChatTemplate, *, reasons: bool = False) -> str:
    """Raises RequestError naming the first field of which the model would see nothing.

    reasons: reasoning of earlier answers is taken even where the template leaves it out, because answers have it.
    """
    _check_variables(body.chat_template_kwargs or {}, template)
    function_of: dict[str | None, str] = {}
    for index, message in enumerate(body.messages):
        if isinstance(message, AssistantMessage):
            function_of |= {call.id: call.function.name for call in message.tool_calls or ()}
        if not _names_its_call(message, function_of):
            _check_name(index, message, template)
        _check_reasoning(index, message, template, reasons=reasons)
    tools = body.offered_tools
    options = RenderOptions(
        tools=[tool.shown() for tool in tools] or None,
        add_generation_prompt=body.begins_an_answer,
        variables=body.chat_template_kwargs or {},
    )
    messages = [template_message(message) for message in body.messages]
    if body.continue_final_message:
        _check_can_go_on(body.messages[-1])
        text = template.render_open(messages, options)
    else:
        text = template.render(messages, options)
    _check_tools_shown(tools, text, template)
    return text


def num_characters(body: ChatBody) -> int:
    """Roughly, of the prompt: decides whether a thread is worth it."""
    of_tools = _CHARACTERS_OF_TOOLS if body.offered_tools else 0
    return of_tools + sum(len(content_text(message.content)) for message in body.messages)


def _check_variables(variables: dict[str, Any], template: ChatTemplate) -> None:
    for name in variables:
        if name not in template.variables:
            field = field_path(("chat_template_kwargs", name))
            known = ", ".join(sorted(template.variables)) or "none"
            raise RequestError(
                f"{field}: the model's chat template takes no such variable from a request; it takes: {known}",
                field=field,
            )


def _check_tools_shown(tools: list[Tool], text: str, template: ChatTemplate) -> None:
    """A template may ignore tools altogether, or in some chats."""
    hidden = [tool.function.name not in text for tool in tools]
    if tools and (any(hidden) or not template.traits.shows_tools):
        raise RequestError(
            "tools: the model's chat template does not show them to the model; leave them out, or put "
            "a template that does into chat_template.jinja of its directory",
            field="tools",
        )


def _names_its_call(message: ChatMessage, function_of: dict[str | None, str]) -> bool:
    """Whether the name only repeats which function was called (OpenAI's guides and LiteLLM send it), so that nothing is
    lost where it is not shown. function_of: names by the ids of earlier calls."""
    if not isinstance(message, ToolMessage) or message.tool_call_id is None:
        return False
    return message.name is not None and function_of.get(message.tool_call_id) == message.name


def _check_name(index: int, message: ChatMessage, template: ChatTemplate) -> None:
    role = "system" if message.role == "developer" else message.role
    if message.name is not None and role not in template.traits.named_roles:
        _refuse(index, "name", f"shows no name of a message with role {safe_text(message.role)}")


def _check_reasoning(
    index: int, message: ChatMessage, template: ChatTemplate, *, reasons: bool
) -> None:
    has_reasoning = isinstance(message, AssistantMessage) and message.all_reasoning
    if has_reasoning and not (reasons or template.traits.shows_reasoning):
        _refuse(index, "reasoning_content", "shows no reasoning of earlier answers")


def _refuse(index: int, name: str, reason: str) -> None:
    field = f"messages[{index}].{name}"
    raise RequestError(f"{field}: the model's chat template {reason}; leave it out", field=field)


def _check_can_go_on(message: ChatMessage) -> None:
    """What follows the content in the template would be lost."""
    reason = None
    if not content_text(message.content):
        reason = "has no content"
    elif isinstance(message, AssistantMessage) and message.tool_calls:
        reason = "has tool calls"
    if reason is not None:
        raise RequestError(
            f"continue_final_message: the last message {reason}, so it cannot be continued",
            field="continue_final_message",
        )
