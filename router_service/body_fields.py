"""Kinds of fields that request bodies are made of: strict models, neutral values, errors that name their field."""

import json
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from router_service.openai_errors import safe_text

FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
UNION_TAGS = (
    "<text>",
    "<parts>",
    "<message>",
    "<function_call>",
    "<function_call_output>",
    "<reasoning>",
)
"""That pydantic adds to the location of an error; they are in no body."""


class OneOf:
    """Marks a field that may only hold one of some values, types included (true is not 1)."""

    def __init__(self, *allowed: object) -> None:
        self._allowed = allowed

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": list(self._allowed)}

    def _check(self, value: object) -> object:
        allowed = self._allowed
        if not any(type(value) is type(option) and value == option for option in allowed):
            options = " or ".join(json.dumps(option) for option in allowed)
            raise PydanticCustomError(
                "unsupported",
                "{value} is not supported; supported: {options}",
                {"value": safe_text(value), "options": options},
            )
        return value


def one_of(*allowed: object) -> OneOf:
    """A field that may only hold one of these values. Often the neutral ones alone."""
    return OneOf(*allowed)


NullOnly = Annotated[Any, one_of(None)]
NullOrEmptyList = Annotated[Any, one_of(None, [])]
OneNumber = Annotated[Any, one_of(None, 1, 1.0)]
OnlyFalse = Annotated[Any, one_of(None, False)]
OnlyTrue = Annotated[Any, one_of(None, True)]
NullOrEmptyObject = Annotated[Any, one_of(None, {})]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class SentBack(Strict):
    """What a part of an answer is when it is sent back: an SDK writes null for each field that it knows and we do not
    have, under its own name or the API's. So here null means absent for every field."""

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, value: object) -> object:
        if not isinstance(value, dict) or None not in value.values():
            return value
        return {k: v for k, v in value.items() if v is not None or k in cls.model_fields}


def at_field(field: str, text: str) -> PydanticCustomError:
    """An error of a whole model that belongs to one of its fields."""
    return PydanticCustomError("field", "{text}", {"text": text, "field": field})
