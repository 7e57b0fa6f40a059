"""Bodies of /tokenize and /detokenize, with vLLM's names. What a chat has in common with chats is checked as theirs."""

from typing import Any

from pydantic import Field

from router_service.body_fields import NullOnly, Strict


class TokenizeTextBody(Strict):
    """POST /tokenize with a prompt."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = Field(default=None, description="default true")
    return_token_strs: bool | None = None


class TokenizeChatBody(Strict):
    """POST /tokenize with messages. Fields without a type here are those of /v1/chat/completions."""

    messages: list[Any]
    model: str | None = None
    add_generation_prompt: bool | None = Field(default=None, description="default true")
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(default=None, description="default false")
    return_token_strs: bool | None = None
    tools: list[Any] | None = None
    chat_template: NullOnly = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Strict):
    """POST /detokenize."""

    tokens: list[Any]
    model: str | None = None


_OF_THE_CHAT = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)


def chat_of(body: TokenizeChatBody, model: str) -> dict[str, Any]:
    """The chat whose prompt is asked for; absent fields stay absent."""
    given = {name: getattr(body, name) for name in _OF_THE_CHAT}
    return {"model": model} | {name: value for name, value in given.items() if value is not None}
