"""The fields of a body that ask for structured output: OpenAI's, vLLM's, and vLLM's older ones."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from router_service.body_fields import OnlyTrue, Strict, at_field

MAX_GRAMMAR_CHARACTERS = 65_536
MAX_CHOICE_STRINGS = 1024


def _schema_or_text(value: object) -> object:
    if not isinstance(value, dict | str | None):
        raise PydanticCustomError("json_schema", "must be a JSON schema, an object or its text")
    return value


Schema = Annotated[
    Any,
    BeforeValidator(_schema_or_text, json_schema_input_type=dict[str, Any] | str | None),
]
Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Options = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICE_STRINGS)]


class JsonSchemaFormat(Strict):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _a_schema_where_it_belongs(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise at_field("json_schema", "is required with type json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise at_field("json_schema", f"has no meaning with type {self.type}")
        return self


class StructuredOutputs(Strict):
    """One of them."""

    json_: Annotated[Schema, Field(alias="json")] = None
    regex: Text | None = None
    choice: Options | None = None
    grammar: Text | None = None
    json_object: OnlyTrue = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            raise PydanticCustomError(
                "field_count",
                "needs exactly one of json, regex, choice, grammar and json_object, got {count}",
                {"count": len(given)},
            )
        return self


class GrammarFields(Strict):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: Text | None = None
    guided_choice: Options | None = None
    guided_grammar: Text | None = None

    @property
    def grammar_fields(self) -> list[str]:
        """Names of those that ask for a grammar."""
        given = [name for name in GrammarFields.model_fields if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type == "text":
            given.remove("response_format")
        return given
