"""Bodies of /tokenize and /detokenize, with vLLM's names. What a chat has in common with chats is checked as theirs."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from router_service.body_fields import Strict
from router_service.prompts import TOKEN_IDS


class TokenizeTextBody(Strict):
    """POST /tokenize with a prompt."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = Field(default=None, description="default true")
    return_token_strs: bool | None = None


class TokenizeChatBody(Strict):
    """POST /tokenize with messages, without the fields that are a chat's."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    """POST /detokenize."""

    tokens: Annotated[list[Any], WithJsonSchema(TOKEN_IDS)]
    model: str | None = None


THE_CHATS = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)
"""Names that mean what they mean in a chat."""
