"""The `prompt` of a completion: one or several, as text or as token ids. Checked by hand, because ids can be many."""

from dataclasses import dataclass
from typing import Any

from cluster.errors import RequestError
from router_service.openai_errors import ContextLengthError, safe_text

MAX_PROMPTS = 1024
"""Prompts of one request."""
MAX_CHOICES = 1024
"""Of all prompts of one request; each costs the engine what a request of its own does."""

Prompt = str | list[int]

TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
"""Schema of one list; the model's vocabulary is its upper limit."""
_TEXT = {"type": "string", "minLength": 1}
PROMPTS = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
        {**TOKEN_IDS, "minItems": 1},
        {
            "type": "array",
            "items": {**TOKEN_IDS, "minItems": 1},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ]
}
"""Schema of what `parse_prompts` takes."""


@dataclass(frozen=True)
class TokenIdLimits:
    """Ids are in [0, vocab_size); with at least `min_answer_tokens` after it a prompt fits max_model_len."""

    vocab_size: int
    max_model_len: int
    min_answer_tokens: int = 1


def parse_prompts(value: Any, limits: TokenIdLimits) -> list[Prompt]:
    """One prompt or more, none of them empty. Raises RequestError naming the place in `prompt`."""
    if isinstance(value, str):
        return [_text(value, "prompt")]
    if not isinstance(value, list):
        raise _wrong(value, "prompt")
    if not value:
        raise _empty("prompt")
    if _is_integer(value[0]) or isinstance(value[0], bool | float):
        return [_token_ids(value, "prompt", limits)]
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            f"prompt: {len(value)} prompts in one request; the limit is {MAX_PROMPTS}",
            field="prompt",
        )
    return [_member(item, f"prompt[{index}]", value, limits) for index, item in enumerate(value)]


def check_num_choices(num_prompts: int, num_choices: int) -> None:
    """num_choices: of each prompt. Raises RequestError."""
    if num_prompts * num_choices > MAX_CHOICES:
        raise RequestError(
            f"n: {num_prompts} prompts with {num_choices} choices each are {num_prompts * num_choices} "
            f"choices; the limit is {MAX_CHOICES} in one request",
            field="n",
        )


def prompt_fields(value: Any) -> list[str]:
    """Where each prompt of a value that `parse_prompts` took stands in the body."""
    if isinstance(value, list) and isinstance(value[0], str | list):
        return [f"prompt[{index}]" for index in range(len(value))]
    return ["prompt"]


def _member(item: Any, field: str, prompts: list[Any], limits: TokenIdLimits) -> Prompt:
    if type(item) is not type(prompts[0]):
        raise RequestError(
            f"{field}: prompts of one request must be all strings or all token id lists",
            field=field,
        )
    if isinstance(item, str):
        return _text(item, field)
    if isinstance(item, list):
        return _token_ids(item, field, limits)
    raise _wrong(item, field)


def _text(value: str, field: str) -> str:
    if not value:
        raise _empty(field)
    return value


def _token_ids(value: list[Any], field: str, limits: TokenIdLimits) -> list[int]:
    if not value:
        raise _empty(field)
    if len(value) > limits.max_model_len - limits.min_answer_tokens:
        raise prompt_too_long(
            f"{len(value)} tokens",
            limits.max_model_len,
            field=field,
            needs_answer=limits.min_answer_tokens > 0,
        )
    check_token_ids(value, field, limits.vocab_size)
    return value


def check_token_ids(value: list[Any], field: str, vocab_size: int) -> None:
    """Raises RequestError naming the first one that is no id of the model."""
    for index, token_id in enumerate(value):
        if not _is_integer(token_id) or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{field}[{index}]: {safe_text(token_id)} is not a token id; "
                f"ids are integers from 0 to {vocab_size - 1}",
                field=f"{field}[{index}]",
            )


def prompt_too_long(
    size: str, max_model_len: int, *, field: str, needs_answer: bool = True
) -> ContextLengthError:
    answer = ", of which at least one is for the answer" if needs_answer else ""
    return ContextLengthError(
        f"{field}: prompt is too long: it has {size}, and {context_length_is(max_model_len)}{answer}; "
        "shorten the prompt",
        field=field,
    )


def context_length_is(max_model_len: int) -> str:
    """In OpenAI's words: clients know an overflow by them, and read the number (LiteLLM, agents that compact).

    `prompt is too long` above are Anthropic's, which LangChain looks for too.
    """
    return f"this model's maximum context length is {max_model_len} tokens"


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _wrong(value: Any, field: str) -> RequestError:
    return RequestError(
        f"{field}: {safe_text(value)} is not a prompt; send a string, a list of strings, "
        "a list of token ids or a list of such lists",
        field=field,
    )


def _empty(field: str) -> RequestError:
    return RequestError(f"{field}: the prompt is empty; send at least one token", field=field)
