"""The prompt of a chat: its messages through the model's template, as far as the template shows what they hold."""

from typing import Any

from cluster.errors import RequestError
from router_service.chat_messages import (
    AssistantMessage,
    ChatMessage,
    content_text,
    template_message,
)
from router_service.chat_template import ChatTemplate
from router_service.json_body import field_path
from router_service.openai_errors import safe_text
from router_service.protocol import ChatBody
from router_service.template_probes import RenderOptions


def chat_prompt(body: ChatBody, template: ChatTemplate) -> str:
    """Raises RequestError naming the first field of which the model would see nothing."""
    _check_variables(body.chat_template_kwargs or {}, template)
    for index, message in enumerate(body.messages):
        _check_shown(index, message, template)
    options = RenderOptions(
        add_generation_prompt=body.begins_an_answer, variables=body.chat_template_kwargs or {}
    )
    messages = [template_message(message) for message in body.messages]
    if not body.continue_final_message:
        return template.render(messages, options)
    _check_can_go_on(body.messages[-1])
    return template.render_open(messages, options)


def num_characters(body: ChatBody) -> int:
    """Roughly, of the prompt: decides whether a thread is worth it."""
    return sum(len(content_text(message.content)) for message in body.messages)


def _check_variables(variables: dict[str, Any], template: ChatTemplate) -> None:
    for name in variables:
        if name not in template.variables:
            field = field_path(("chat_template_kwargs", name))
            known = ", ".join(sorted(template.variables)) or "none"
            raise RequestError(
                f"{field}: the model's chat template takes no such variable from a request; it takes: {known}",
                field=field,
            )


def _check_shown(index: int, message: ChatMessage, template: ChatTemplate) -> None:
    traits = template.traits
    role = "system" if message.role == "developer" else message.role
    if message.name is not None and role not in traits.named_roles:
        _refuse(index, "name", f"shows no name of a message with role {safe_text(message.role)}")
    has_reasoning = isinstance(message, AssistantMessage) and message.all_reasoning
    if has_reasoning and not traits.shows_reasoning:
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
