"""The fields of a body that decide which tokens come: types and ranges that need no model."""

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from router_service.body_fields import Strict

MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
SMALLEST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY = 0.01, 100.0
"""Beyond them a logit in float32 may become infinite."""

Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = int


def _refuse_empty_word(words: list[str] | None) -> list[str] | None:
    if words is not None and any(not word.strip() for word in words):
        raise PydanticCustomError("empty_word", "bad words must not be empty or blank")
    return words


class SamplingFields(Strict):
    """OpenAI's and vLLM's, by their names and with their meanings."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None

    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=SMALLEST_REPETITION_PENALTY, le=LARGEST_REPETITION_PENALTY)]
        | None
    ) = None
    logit_bias: dict[str, Bias] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    bad_words: Annotated[
        Annotated[
            list[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARACTERS)]],
            Field(max_length=MAX_BAD_WORDS),
        ]
        | None,
        AfterValidator(_refuse_empty_word),
    ] = None

    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
