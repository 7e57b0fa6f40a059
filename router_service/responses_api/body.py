"""The body of /v1/responses: fields of its own. Nothing is stored, so whatever would need that is refused."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from router_service.body_fields import (
    NullOnly,
    NullOrEmptyList,
    OnlyFalse,
    OnlyTrue,
    SentBack,
    Strict,
    at_field,
    one_of,
)
from router_service.chat_messages import refuse_too_many_messages
from router_service.openai_errors import safe_text

LOGPROBS = "message.output_text.logprobs"
THE_CHATS = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "user",
    "metadata",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "cache_salt",
    "priority",
)
"""Names that mean what they mean in a chat."""

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(SentBack):
    """What an answer says besides its text may be sent back and says nothing more to the model."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: NullOrEmptyList = None
    logprobs: list[Any] | None = None


def _content_kind(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Tag("<parts>")],
    Discriminator(_content_kind),
]


class MessageItem(SentBack):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: NullOnly = None


class FunctionCallItem(SentBack):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status | None = None


class ReasoningText(SentBack):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(SentBack):
    type: Literal["reasoning"]
    id: str | None = None
    summary: NullOrEmptyList = None
    content: list[ReasoningText] | None = None
    encrypted_content: NullOnly = None
    status: Status | None = None


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _known_kind(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is not None and kind not in _KINDS:
        raise at_field("type", f"is {safe_text(kind)}; supported: {', '.join(_KINDS)}")
    return value


def _item_kind(value: object) -> str:
    """Of a message the type may be absent."""
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind or 'message'}>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_item_kind),
    BeforeValidator(_known_kind),
]
Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Item], Field(min_length=1), Tag("<parts>")],
    Discriminator(_content_kind),
]


class FunctionTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class TextConfig(Strict):
    format: dict[str, Any] | None = None
    verbosity: Any = None


class Reasoning(Strict):
    effort: Any = None
    summary: NullOnly = None
    generate_summary: NullOnly = None


class ResponseStreamOptions(Strict):
    """A chat's include_usage is what benchmarks send here too; the last event always has the usage."""

    include_obfuscation: OnlyFalse = None
    include_usage: OnlyTrue = None


class ResponsesBody(Strict):
    """POST /v1/responses, without the fields that it has in common with a chat."""

    input: Annotated[Input, BeforeValidator(refuse_too_many_messages)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Annotated[Any, one_of(None, "disabled")] = None
    store: OnlyFalse = None
    background: OnlyFalse = None
    previous_response_id: NullOnly = None
    conversation: NullOnly = None
    prompt: NullOnly = None
    max_tool_calls: NullOnly = None

    @property
    def with_logprobs(self) -> bool:
        return bool(self.include)

    @model_validator(mode="after")
    def _logprobs_agree(self) -> "ResponsesBody":
        if self.top_logprobs is not None and not self.with_logprobs:
            raise at_field("top_logprobs", f'needs include ["{LOGPROBS}"]')
        return self
