"""Messages of a chat: what is supported of them, and how a chat template sees them."""

import json
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from router_service.body_fields import (
    FUNCTION_NAME,
    NullOnly,
    NullOrEmptyList,
    SentBack,
    Strict,
    at_field,
)
from router_service.openai_errors import safe_text
from router_service.template_probes import reasoning_fields

MAX_MESSAGES = 16384
"""Of one chat, parts of messages counted too: each costs some microseconds during which nobody else is served."""
PART_JOINER = "\n"
"""Between the text parts of one message."""


Name = Annotated[str, Field(min_length=1, max_length=256)]
"""Of a participant; only where the chat template shows it."""


class TextPart(Strict):
    type: Literal["text"]
    text: str


def _content_kind(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Tag("<parts>")],
    Discriminator(_content_kind),
]


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: Name | None = None


class FunctionCall(SentBack):
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    arguments: str

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> "FunctionCall":
        _ = self.parsed_arguments
        return self

    @cached_property
    def parsed_arguments(self) -> dict[str, Any]:
        """Parsed once: deep ones may be too deep for a stack that is a little longer. Of a key that occurs twice the
        last value counts, as for most who read JSON: a model may write so, and its answer comes back as it was."""
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise at_field(
                "arguments", f"is {safe_text(self.arguments)}; it must hold a JSON object"
            )
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise at_field("arguments", "holds a lone surrogate") from None
        except RecursionError:
            raise at_field("arguments", "is nested too deeply") from None
        except ValueError:
            reason = "holds a number that JSON has not (NaN, Infinity, or one beyond 1.8e308)"
            raise at_field("arguments", reason) from None
        return value


class ToolCall(SentBack):
    id: str | None = None
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(SentBack):
    """An earlier answer. The null-only fields are those that clients send back as they got them.

    Reasoning has two names, as in answers; only for models that reason.
    """

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    name: Name | None = None
    refusal: NullOnly = None
    audio: NullOnly = None
    function_call: NullOnly = None
    annotations: NullOrEmptyList = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _one_reasoning(self) -> "AssistantMessage":
        both = self.reasoning, self.reasoning_content
        if None not in both and both[0] != both[1]:
            raise at_field("reasoning", "differs from reasoning_content; send one of them")
        return self

    @property
    def all_reasoning(self) -> str:
        """Empty if there is none."""
        return self.reasoning_content or self.reasoning or ""


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content | None = None
    tool_call_id: str | None = None
    name: Name | None = None


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


def refuse_too_many_messages(value: object) -> object:
    """Before any of them is looked at."""
    if not isinstance(value, list):
        return value
    contents = [m.get("content") for m in value[:MAX_MESSAGES] if isinstance(m, dict)]
    count = len(value) + sum(len(content) for content in contents if isinstance(content, list))
    if count > MAX_MESSAGES:
        raise PydanticCustomError(
            "too_many_messages",
            "{count} messages and parts of messages; the limit is {limit}",
            {"count": count, "limit": MAX_MESSAGES},
        )
    return value


def content_text(content: str | list[TextPart] | None) -> str:
    """Parts joined in order with a newline; absent and empty are the same."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return PART_JOINER.join(part.text for part in content)


def template_message(message: ChatMessage) -> dict[str, Any]:
    """The message as a chat template sees it, tool-call arguments as objects."""
    shown: dict[str, Any] = {"role": message.role, "content": content_text(message.content)}
    if message.name is not None:
        shown["name"] = message.name
    if isinstance(message, AssistantMessage) and message.all_reasoning:
        shown |= reasoning_fields(message.all_reasoning)
    if isinstance(message, AssistantMessage) and message.tool_calls:
        shown["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.parsed_arguments}
    identity = {} if call.id is None else {"id": call.id}
    return {**identity, "type": call.type, "function": function}
