"""Shapes of answers for the OpenAPI document. Nothing is made of these: answers are built where they are told.

They name what every answer has; further fields come with what a request asks for.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorDetails(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """OpenAI's. `param` is the field."""

    error: ErrorDetails


class MessagesErrorDetails(Answer):
    type: str
    message: str


class MessagesError(Answer):
    """Anthropic's. The message begins with the field."""

    type: Literal["error"]
    error: MessagesErrorDetails


class PromptTokensDetails(Answer):
    cached_tokens: int
    replayed_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    weight_version: str
    choices: list[CompletionChoice]
    usage: Usage


class AnswerMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None


class ChatChoice(Answer):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    weight_version: str
    choices: list[ChatChoice]
    usage: Usage


class ResponsesUsage(Answer):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    model: str
    weight_version: str
    output: list[dict[str, Any]]
    usage: ResponsesUsage
    max_output_tokens: int | None
    temperature: float
    top_p: float
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    top_logprobs: int
    truncation: Literal["disabled"]
    background: Literal[False]
    previous_response_id: None
    metadata: dict[str, str]
    store: Literal[False]


class MessagesUsage(Answer):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    weight_version: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: MessagesUsage


class CountedTokens(Answer):
    input_tokens: int


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    weight_version: str | None


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Ready(Answer):
    status: Literal["ready"]


class NotReady(Answer):
    status: Literal["unavailable"]
    reason: str


class Live(Answer):
    status: Literal["live"]


class Version(Answer):
    version: str
