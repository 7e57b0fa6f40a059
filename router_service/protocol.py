"""Request bodies of the OpenAI API as strict models: what is supported, what is refused, and with which message.

Nothing is accepted and ignored. A known field that is not supported may hold its neutral value, which is honoured by
doing nothing. null is the same as absent. The prompt of a completion is checked in `prompts.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from cluster.types import Running
from router_service.body_fields import (
    NullOnly,
    NullOrEmptyList,
    NullOrEmptyObject,
    OneNumber,
    OnlyFalse,
    OnlyTrue,
    Strict,
    at_field,
    one_of,
)
from router_service.chat_messages import ChatMessage, refuse_too_many_messages
from router_service.grammar_fields import GrammarFields
from router_service.openai_errors import safe_text
from router_service.prompts import PROMPTS
from router_service.sampling_fields import SamplingFields
from router_service.tool_fields import MAX_TOOLS, Tool, ToolChoice, chosen_function

MAX_STOP_STRINGS = 4
MAX_CHOICES = 128
MAX_LOGPROBS = 20


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _refuse_empty_stop(value: list[str] | None) -> list[str] | None:
    if value is not None and "" in value:
        raise PydanticCustomError("empty_stop", "stop strings must not be empty")
    return value


StopAsSent = (
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOP_STRINGS)]
    | None
)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: OnlyFalse = None

    @model_validator(mode="after")
    def _usage_is_included(self) -> "StreamOptions":
        if self.continuous_usage_stats and not self.include_usage:
            raise at_field("continuous_usage_stats", "needs include_usage true")
        return self


class GenerationFields(SamplingFields, GrammarFields):
    """What both endpoints share."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[
        Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None,
        BeforeValidator(_stop_list, json_schema_input_type=StopAsSent),
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
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None

    # vLLM's, at their neutral values only
    length_penalty: OneNumber = None
    include_stop_str_in_output: OnlyFalse = None
    use_beam_search: OnlyFalse = None
    skip_special_tokens: OnlyTrue = None
    spaces_between_special_tokens: OnlyTrue = None
    truncate_prompt_tokens: NullOnly = None
    return_tokens_as_token_ids: OnlyFalse = None
    logits_processors: NullOnly = None
    request_id: NullOnly = None
    kv_transfer_params: NullOnly = None
    vllm_xargs: NullOnly = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise at_field("stream_options", "is only allowed with stream true")
        if self.prompt_logprobs is not None and self.stream:
            raise at_field("prompt_logprobs", "is only given with stream false")
        start, end = self.routed_experts_start, self.routed_experts_end
        if not self.return_routed_experts:
            if start is not None:
                raise at_field("routed_experts_start", "needs return_routed_experts")
            if end is not None:
                raise at_field("routed_experts_end", "needs return_routed_experts")
        if end is not None and end <= (start or 0):
            raise at_field(
                "routed_experts_end", f"is {end}; it must be over the start, {start or 0}"
            )
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

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

    prompt: Annotated[Any, WithJsonSchema(PROMPTS)]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Annotated[Any, one_of(None, "")] = None
    add_special_tokens: OnlyTrue = None
    prompt_embeds: NullOnly = None

    @model_validator(mode="after")
    def _all_choices_are_given(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != self.num_choices:
            raise at_field(
                "best_of", f"is {self.best_of} and n is {self.num_choices}; only n is supported"
            )
        return self

    @model_validator(mode="after")
    def _something_is_answered(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise at_field(
                "max_tokens", "is 0; it must be at least 1 without echo or prompt_logprobs"
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)


class ChatBody(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[ChatMessage], BeforeValidator(refuse_too_many_messages), Field(min_length=1)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    functions: NullOrEmptyList = None
    function_call: Annotated[Any, one_of(None, "none")] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    store: OnlyFalse = None
    metadata: NullOrEmptyObject = None
    service_tier: Annotated[Any, one_of(None, "auto", "default")] = None
    modalities: Annotated[Any, one_of(None, ["text"])] = None
    audio: NullOnly = None
    prediction: NullOnly = None
    reasoning_effort: NullOnly = None
    verbosity: NullOnly = None
    web_search_options: NullOnly = None
    prompt_cache_key: NullOnly = None
    prompt_cache_retention: NullOnly = None
    safety_identifier: NullOnly = None
    echo: OnlyFalse = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: OnlyFalse = None
    documents: NullOnly = None
    chat_template: NullOnly = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: NullOrEmptyObject = None

    @model_validator(mode="after")
    def _logprobs_agree(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise at_field("top_logprobs", "needs logprobs true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @model_validator(mode="after")
    def _tools_agree(self) -> "ChatBody":
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise at_field("tools", f"has two functions with the name {safe_text(twice)}")
        if not names and self.tool_choice not in (None, "none"):
            raise at_field(
                "tool_choice",
                f"is {safe_text(self.tool_choice)}, which needs tools; send some, or leave it out",
            )
        if not names and self.parallel_tool_calls is not None:
            raise at_field("parallel_tool_calls", "needs tools")
        chosen = self.forced_function
        if chosen is not None and chosen not in names:
            raise at_field(
                "tool_choice",
                f"names {safe_text(chosen)}, which is not among tools; name one of them",
            )
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """None with tool_choice "none": the model is not told of them then."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forces_calls(self) -> bool:
        return self.tool_choice == "required" or self.forced_function is not None

    @property
    def forced_function(self) -> str | None:
        return chosen_function(self.tool_choice)

    @property
    def max_calls(self) -> int | None:
        """After which the answer ends; None: it may have any number."""
        one = self.parallel_tool_calls is False or self.forced_function is not None
        return 1 if one else None

    @model_validator(mode="after")
    def _an_answer_begins_or_goes_on(self) -> "ChatBody":
        if self.continue_final_message and self.add_generation_prompt:
            raise at_field(
                "continue_final_message", "is true and add_generation_prompt too; only one can be"
            )
        return self

    @property
    def begins_an_answer(self) -> bool:
        """The prompt ends with what opens the assistant's turn."""
        return not self.continue_final_message and self.add_generation_prompt is not False

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatBody":
        old, current = self.max_tokens, self.max_completion_tokens
        if old is not None and current is not None and old != current:
            raise at_field(
                "max_completion_tokens", f"is {current} and max_tokens is {old}; send one"
            )
        return self

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class EvictBody(Strict):
    """POST /admin/evict."""

    part: Literal["kv", "routes", "scores", "all"]


class WeightsBody(Strict):
    """POST /admin/weights."""

    model_dir: Annotated[str, Field(min_length=1, max_length=4096)]
    running: Running


class FeaturesBody(Strict):
    """POST /admin/features. What is absent stays as it is."""

    route_replay: bool | None = None
    planned_dispatch: bool | None = None
    prefix_store: bool | None = None
