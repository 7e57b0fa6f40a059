"""Bodies of /v1/messages and /v1/messages/count_tokens (Anthropic): fields that a chat lacks or calls otherwise."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from router_service.body_fields import NullOnly, NullOrEmptyList, SentBack, Strict, at_field, one_of
from router_service.chat_messages import refuse_too_many_messages
from router_service.openai_errors import safe_text

PROMPT_OF_THE_CHAT = ("model",)
THE_CHATS = (
    *PROMPT_OF_THE_CHAT,
    "temperature",
    "top_p",
    "top_k",
    "stream",
    "seed",
    "min_p",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "cache_salt",
    "priority",
)
"""Names that mean what they mean in a chat."""


class CacheControl(Strict):
    """A mark where a prefix ends that shall be kept. Every prefix is, so that it says nothing new."""

    type: Literal["ephemeral"]
    ttl: Annotated[Any, one_of(None, "5m")] = None


class TextBlock(SentBack):
    type: Literal["text"]
    text: str
    citations: NullOrEmptyList = None
    cache_control: CacheControl | None = None


class ToolUseBlock(SentBack):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


def _content_kind(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


Text = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextBlock], Tag("<parts>")],
    Discriminator(_content_kind),
]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(SentBack):
    """What a model thought before an earlier answer. The signature is of no use here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AnswerBlock = Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]


class UserMessage(Strict):
    role: Literal["user"]
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[UserBlock], Tag("<parts>")],
        Discriminator(_content_kind),
    ]


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[AnswerBlock], Tag("<parts>")],
        Discriminator(_content_kind),
    ]


class SystemMessage(Strict):
    role: Literal["system"]
    content: Text


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(Strict):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_no_built_in_one(cls, value: object) -> object:
        """Those have a type and none of the other fields."""
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in (None, "custom"):
            text = f"is {safe_text(kind)}; tools of Anthropic's own are not supported; supported: custom"
            raise at_field("type", text)
        return value


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _a_name_where_it_belongs(self) -> "ToolChoice":
        if self.type == "tool" and self.name is None:
            raise at_field("name", "is required with type tool")
        if self.type != "tool" and self.name is not None:
            raise at_field("name", f"has no meaning with type {self.type}")
        return self


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: NullOnly = None


class Metadata(Strict):
    user_id: str | None = None


class PromptBody(Strict):
    """What the prompt is made of; the body of count_tokens but for `model`, which is as in a chat."""

    messages: Annotated[
        list[Message], BeforeValidator(refuse_too_many_messages), Field(min_length=1)
    ]
    system: Text | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Annotated[Any, one_of(None, {"type": "disabled"})] = None
    cache_control: CacheControl | None = None


class MessagesBody(PromptBody):
    """POST /v1/messages, without the fields that it has in common with a chat."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[Any, one_of(None, "auto", "standard_only")] = None
    container: NullOnly = None
    context_management: NullOnly = None
    mcp_servers: NullOrEmptyList = None
    output_config: OutputConfig | None = None
