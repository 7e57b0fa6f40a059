"""What is served on the API port, one row per path and method: bodies, answers, errors."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from router_service.error_shapes import ANTHROPIC_PATH
from router_service.messages_api.body import (
    PROMPT_OF_THE_CHAT,
    MessagesBody,
    PromptBody,
)
from router_service.messages_api.body import THE_CHATS as CHATS_IN_MESSAGES
from router_service.openapi import answers
from router_service.protocol import ChatBody, CompletionBody
from router_service.responses_api.body import THE_CHATS as CHATS_IN_RESPONSES
from router_service.responses_api.body import ResponsesBody
from router_service.tokenization_body import THE_CHATS as CHATS_IN_TOKENIZE
from router_service.tokenization_body import DetokenizeBody, TokenizeChatBody, TokenizeTextBody


@dataclass(frozen=True)
class Body:
    """own: the fields of the model; the_chats: names that stand beside them and are ChatBody's."""

    own: type[BaseModel]
    the_chats: Collection[str] = ()


@dataclass(frozen=True)
class Operation:
    """bodies: one of them is sent; streams: the answer may be server-sent events."""

    path: str
    method: Literal["get", "post"]
    summary: str
    answer: type[BaseModel] | None
    """None: text or, if `refuses`, none at all."""
    bodies: tuple[Body, ...] = ()
    streams: bool = False
    refuses: bool = False
    needs_key: bool = True

    @property
    def error(self) -> type[BaseModel]:
        ours = self.path == ANTHROPIC_PATH or self.path.startswith(f"{ANTHROPIC_PATH}/")
        return answers.MessagesError if ours else answers.Error


OPERATIONS = (
    Operation("/v1/models", "get", "The served model, as a list of one", answers.ModelList),
    Operation("/v1/models/{model}", "get", "The served model by its name", answers.ModelCard),
    Operation(
        "/v1/completions",
        "post",
        "Text that follows a prompt",
        answers.Completion,
        (Body(CompletionBody),),
        streams=True,
    ),
    Operation(
        "/v1/chat/completions",
        "post",
        "The next message of a chat",
        answers.ChatCompletion,
        (Body(ChatBody),),
        streams=True,
    ),
    Operation(
        "/v1/responses",
        "post",
        "The next message of a chat (OpenAI Responses, stateless)",
        answers.ResponseAnswer,
        (Body(ResponsesBody, CHATS_IN_RESPONSES),),
        streams=True,
    ),
    Operation(
        "/v1/messages",
        "post",
        "The next message of a chat (Anthropic Messages)",
        answers.MessageAnswer,
        (Body(MessagesBody, CHATS_IN_MESSAGES),),
        streams=True,
    ),
    Operation(
        "/v1/messages/count_tokens",
        "post",
        "Tokens of a prompt (Anthropic Messages)",
        answers.CountedTokens,
        (Body(PromptBody, PROMPT_OF_THE_CHAT),),
    ),
    Operation(
        "/tokenize",
        "post",
        "Token ids of a prompt or of messages",
        answers.Tokenized,
        (Body(TokenizeTextBody), Body(TokenizeChatBody, CHATS_IN_TOKENIZE)),
    ),
    Operation(
        "/detokenize", "post", "Text of token ids", answers.Detokenized, (Body(DetokenizeBody),)
    ),
    Operation("/v1/embeddings", "post", "Refused: the model generates", None, refuses=True),
    Operation("/health", "get", "Whether a step can run", answers.Ready, needs_key=False),
    Operation("/health/live", "get", "Whether the process lives", answers.Live, needs_key=False),
    Operation("/metrics", "get", "Metrics of the cell for Prometheus", None, needs_key=False),
    Operation("/version", "get", "Version of the software", answers.Version, needs_key=False),
)
