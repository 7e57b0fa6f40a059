"""Kinds of fields that request bodies are made of: strict models, neutral values, errors that name their field."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from router_service.openai_errors import safe_text

UNION_TAGS = (
    "<text>",
    "<parts>",
    "<message>",
    "<function_call>",
    "<function_call_output>",
    "<reasoning>",
)
"""That pydantic adds to the location of an error; they are in no body."""


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


NullOnly = Annotated[Any, one_of(None)]
NullOrEmptyList = Annotated[Any, one_of(None, [])]
OneNumber = Annotated[Any, one_of(None, 1, 1.0)]
OnlyFalse = Annotated[Any, one_of(None, False)]
OnlyTrue = Annotated[Any, one_of(None, True)]
NullOrEmptyObject = Annotated[Any, one_of(None, {})]
PlainText = Annotated[Any, one_of(None, {"type": "text"})]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def at_field(field: str, text: str) -> PydanticCustomError:
    """An error of a whole model that belongs to one of its fields."""
    return PydanticCustomError("field", "{text}", {"text": text, "field": field})
