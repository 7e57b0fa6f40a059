"""Request bodies of the OpenAI API as strict models: what is supported, what is refused, and with which message.

Nothing is accepted and ignored. A known field that is not supported may hold its neutral value, which is honoured by
doing nothing. null is the same as absent. The prompt of a completion is checked in `prompts.py`.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from cluster.errors import RequestError
from router_service.json_body import field_path
from router_service.openai_errors import safe_text

MAX_STOP_STRINGS = 4
MAX_STOP_TOKEN_IDS = 128
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_MESSAGES = 16384
"""Of one chat, parts of messages counted too: each costs some microseconds during which nobody else is served."""
PART_JOINER = "\n"
"""Between the text parts of one message."""


def one_of(*allowed: object) -> AfterValidator:
    """A field that may only hold one of these values, types included (true is not 1). Often the neutral ones alone."""

    def check(value: object) -> object:
        if not any(type(value) is type(option) and value == option for option in allowed):
            options = " or ".join(json.dumps(option) for option in allowed)
            raise PydanticCustomError(
                "unsupported",
                "{value} is not supported; supported: {options}",
                {"value": safe_text(value), "options": options},
            )
        return value

    return AfterValidator(check)


_NullOnly = Annotated[Any, one_of(None)]
_NullOrEmptyList = Annotated[Any, one_of(None, [])]
_One = Annotated[Any, one_of(None, 1)]
_Zero = Annotated[Any, one_of(None, 0)]
_ZeroNumber = Annotated[Any, one_of(None, 0, 0.0)]
_OneNumber = Annotated[Any, one_of(None, 1, 1.0)]
_False = Annotated[Any, one_of(None, False)]
_True = Annotated[Any, one_of(None, True)]
_NullOrEmptyObject = Annotated[Any, one_of(None, {})]
_PlainText = Annotated[Any, one_of(None, {"type": "text"})]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _refuse_empty_stop(value: list[str] | None) -> list[str] | None:
    if value is not None and "" in value:
        raise PydanticCustomError("empty_stop", "stop strings must not be empty")
    return value


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: _False = None
    include_obfuscation: _False = None


class GenerationFields(_Strict):
    """What both endpoints share."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[
        Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None,
        BeforeValidator(_stop_list),
        AfterValidator(_refuse_empty_stop),
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    return_token_ids: bool | None = None
    return_routed_experts: Annotated[Any, one_of(None, False, True, "weights")] = None
    routed_experts_start: Annotated[int, Field(ge=0)] | None = None
    routed_experts_end: Annotated[int, Field(ge=1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    ignore_eos: bool | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    priority: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None

    # OpenAI's, at their neutral values only
    presence_penalty: _ZeroNumber = None
    frequency_penalty: _ZeroNumber = None
    logit_bias: _NullOrEmptyObject = None
    response_format: _PlainText = None

    # vLLM's, likewise
    repetition_penalty: _OneNumber = None
    length_penalty: _OneNumber = None
    bad_words: _NullOrEmptyList = None
    include_stop_str_in_output: _False = None
    use_beam_search: _False = None
    skip_special_tokens: _True = None
    spaces_between_special_tokens: _True = None
    prompt_logprobs: _NullOnly = None
    allowed_token_ids: _NullOnly = None
    truncate_prompt_tokens: _NullOnly = None
    return_tokens_as_token_ids: _False = None
    structured_outputs: _NullOnly = None
    guided_json: _NullOnly = None
    guided_regex: _NullOnly = None
    guided_choice: _NullOnly = None
    guided_grammar: _NullOnly = None
    logits_processors: _NullOnly = None
    request_id: _NullOnly = None
    kv_transfer_params: _NullOnly = None
    vllm_xargs: _NullOnly = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise _at("stream_options", "is only allowed with stream true")
        start, end = self.routed_experts_start, self.routed_experts_end
        if not self.return_routed_experts:
            if start is not None:
                raise _at("routed_experts_start", "needs return_routed_experts")
            if end is not None:
                raise _at("routed_experts_end", "needs return_routed_experts")
        if end is not None and end <= (start or 0):
            raise _at("routed_experts_end", f"is {end}; it must be over the start, {start or 0}")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def max_tokens_field(self) -> str:
        """The name under which the client set `requested_max_tokens`."""
        return "max_tokens"

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives that are listed with the log-prob of each output token; None: no log-probs."""
        return None

    @property
    def echoes(self) -> bool:
        """The prompt comes first in every choice."""
        return False

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return 1 if self.n is None else self.n


class CompletionBody(GenerationFields):
    """POST /v1/completions."""

    prompt: Any
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Annotated[Any, one_of(None, "")] = None
    add_special_tokens: _True = None
    prompt_embeds: _NullOnly = None

    @model_validator(mode="after")
    def _all_choices_are_given(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != self.num_choices:
            raise _at(
                "best_of", f"is {self.best_of} and n is {self.num_choices}; only n is supported"
            )
        return self

    @model_validator(mode="after")
    def _something_is_answered(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise _at("max_tokens", "is 0; it must be at least 1 without echo")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)


# Chat messages


class TextPart(_Strict):
    type: Literal["text"]
    text: str


_TAGS = ("<text>", "<parts>")


def _content_kind(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Tag("<parts>")],
    Discriminator(_content_kind),
]


class SystemMessage(_Strict):
    role: Literal["system", "developer"]
    content: Content
    name: _NullOnly = None


class UserMessage(_Strict):
    role: Literal["user"]
    content: Content
    name: _NullOnly = None


class FunctionCall(_Strict):
    name: Annotated[str, Field(min_length=1)]
    arguments: str

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> "FunctionCall":
        self.parsed_arguments()
        return self

    def parsed_arguments(self) -> dict[str, Any]:
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise _at("arguments", f"is {safe_text(self.arguments)}; it must hold a JSON object")
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _at("arguments", "holds a lone surrogate") from None
        return value


class ToolCall(_Strict):
    id: str | None = None
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(_Strict):
    """An earlier answer. The null-only fields are those that clients send back as they got them."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    name: _NullOnly = None
    refusal: _NullOnly = None
    audio: _NullOnly = None
    function_call: _NullOnly = None
    annotations: _NullOrEmptyList = None
    reasoning: _NullOnly = None
    reasoning_content: _NullOnly = None


class ToolMessage(_Strict):
    role: Literal["tool"]
    content: Content | None = None
    tool_call_id: str | None = None
    name: _NullOnly = None


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


def _refuse_too_many_messages(value: object) -> object:
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


class ChatBody(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[ChatMessage], BeforeValidator(_refuse_too_many_messages), Field(min_length=1)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: _NullOrEmptyList = None
    functions: _NullOrEmptyList = None
    function_call: Annotated[Any, one_of(None, "none")] = None
    tool_choice: Annotated[Any, one_of(None, "none")] = None
    parallel_tool_calls: _NullOnly = None
    store: _False = None
    metadata: _NullOrEmptyObject = None
    service_tier: Annotated[Any, one_of(None, "auto", "default")] = None
    modalities: Annotated[Any, one_of(None, ["text"])] = None
    audio: _NullOnly = None
    prediction: _NullOnly = None
    reasoning_effort: _NullOnly = None
    verbosity: _NullOnly = None
    web_search_options: _NullOnly = None
    prompt_cache_key: _NullOnly = None
    prompt_cache_retention: _NullOnly = None
    safety_identifier: _NullOnly = None
    echo: _False = None
    add_generation_prompt: _True = None
    continue_final_message: _False = None
    add_special_tokens: _False = None
    documents: _NullOnly = None
    chat_template: _NullOnly = None
    chat_template_kwargs: _NullOrEmptyObject = None
    mm_processor_kwargs: _NullOrEmptyObject = None

    @model_validator(mode="after")
    def _logprobs_agree(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise _at("top_logprobs", "needs logprobs true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatBody":
        old, current = self.max_tokens, self.max_completion_tokens
        if old is not None and current is not None and old != current:
            raise _at("max_completion_tokens", f"is {current} and max_tokens is {old}; send one")
        return self

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class EvictBody(_Strict):
    """POST /admin/evict."""

    part: Literal["kv", "routes", "scores", "all"]


class FeaturesBody(_Strict):
    """POST /admin/features. What is absent stays as it is."""

    route_replay: bool | None = None
    planned_dispatch: bool | None = None
    prefix_store: bool | None = None


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
    if isinstance(message, AssistantMessage) and message.tool_calls:
        shown["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.parsed_arguments()}
    identity = {} if call.id is None else {"id": call.id}
    return {**identity, "type": call.type, "function": function}


# Validation and its messages

B = TypeVar("B", bound=_Strict)


def validate(model: type[B], body: dict[str, Any]) -> B:
    """The typed body. Raises RequestError with the path of the first field that is wrong."""
    for name in body:
        if name not in model.model_fields:
            field = field_path((name,))
            raise RequestError(f"{field}: this field is not supported", field=field)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _request_error(error.errors(include_url=False)[0], body) from error


def _at(field: str, text: str) -> PydanticCustomError:
    """An error of a whole model that belongs to one of its fields."""
    return PydanticCustomError("field", "{text}", {"text": text, "field": field})


def _request_error(details: ErrorDetails, body: dict[str, Any]) -> RequestError:
    location = details["loc"]
    context = details.get("ctx", {})
    if details["type"] == "field":
        location = (*location, context["field"])
    if details["type"] in ("union_tag_not_found", "union_tag_invalid"):
        location = (*location, "role")
    field = field_path(_real_path(location, body))
    return RequestError(f"{field}: {_message(details)}", field=field)


def _real_path(location: tuple[str | int, ...], body: Any) -> tuple[str | int, ...]:
    """Location without the tags that pydantic adds for members of a union, which are not in the body."""
    path: list[str | int] = []
    value: Any = body
    for index, part in enumerate(location):
        is_last = index == len(location) - 1
        if _holds(value, part):
            value = value[part]
        elif part in _TAGS or not (is_last and isinstance(value, dict)):
            continue
        path.append(part)
    return tuple(path)


def _holds(value: Any, part: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(part, int)
    return isinstance(value, dict) and part in value


def _message(details: ErrorDetails) -> str:
    kind, given = details["type"], safe_text(details["input"])
    context = details.get("ctx", {})
    if kind in ("missing", "union_tag_not_found"):
        return "this field is required"
    if kind == "extra_forbidden":
        return "this field is not supported"
    if kind == "literal_error":
        return f"is {given}; supported: {context['expected']}"
    if kind == "union_tag_invalid":
        return (
            f"{safe_text(context['tag'])} is not supported; supported: {context['expected_tags']}"
        )
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"must be an object, got {given}"
    if kind in ("unsupported", "field", "empty_stop"):
        return details["msg"]
    return f"{details['msg'][:1].lower()}{details['msg'][1:]}, got {given}"
