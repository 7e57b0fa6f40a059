"""Tools of a chat: the fields of its body that offer them, and schemas of their arguments."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn

import jsonschema_rs
from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.errors import RequestError
from router_service.body_fields import FUNCTION_NAME, Strict
from router_service.openai_errors import safe_text

MAX_TOOLS = 128
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_BACKTRACK_LIMIT = 10_000
"""Steps of one pattern of a schema on one text."""


class FunctionDefinition(Strict):
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition

    def shown(self) -> dict[str, Any]:
        """As a chat template sees it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or _NO_PARAMETERS
        return {"type": self.type, "function": function}


def _is_choice(value: object) -> bool:
    if isinstance(value, str):
        return value in ("none", "auto", "required")
    return value is None or chosen_function(value) is not None


def chosen_function(value: object) -> str | None:
    """Of {"type": "function", "function": {"name": …}}; None for anything else."""
    if not isinstance(value, dict) or set(value) != {"type", "function"}:
        return None
    function = value["function"]
    if value["type"] != "function" or not isinstance(function, dict) or set(function) != {"name"}:
        return None
    return function["name"] if isinstance(function["name"], str) else None


def _check_choice(value: object) -> object:
    if not _is_choice(value):
        raise PydanticCustomError(
            "unsupported",
            "{value} is not supported; supported: none, auto, required or "
            '{{"type": "function", "function": {{"name": NAME}}}}',
            {"value": safe_text(value)},
        )
    return value


_NAMED_CHOICE = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
ToolChoice = Annotated[
    Any,
    AfterValidator(_check_choice),
    WithJsonSchema({"anyOf": [{"enum": [None, "none", "auto", "required"]}, _NAMED_CHOICE]}),
]


class ToolSchemas:
    """What may be called with which arguments. Immutable; nothing is fetched for a schema."""

    def __init__(self, tools: Sequence[Tool], *, are_kept: bool = False) -> None:
        """are_kept: by a grammar, so that nobody has to check. Raises RequestError naming the schema that is none."""
        self._strict: dict[str, jsonschema_rs.Validator | None] = {}
        for index, tool in enumerate(tools):
            validator = _validator(tool.function, f"tools[{index}].function.parameters")
            is_checked = tool.function.strict and not are_kept
            self._strict[tool.function.name] = validator if is_checked else None

    def offers(self, name: str) -> bool:
        return name in self._strict

    def must_see(self, name: str) -> bool:
        """Those of a strict function are checked before anything is told of them."""
        return self._strict.get(name) is not None

    def accept(self, name: str, arguments: str) -> bool:
        """arguments: a JSON object as text. Those of a strict function must match its schema."""
        if name not in self._strict:
            return False
        validator = self._strict[name]
        try:
            return validator is None or validator.is_valid(json.loads(arguments))
        except ValueError:  # a pattern over its limit, or a depth
            return False


def _validator(function: FunctionDefinition, field: str) -> jsonschema_rs.Validator:
    schema = function.parameters or _NO_PARAMETERS
    if schema.get("type", "object") != "object":
        raise RequestError(
            f"{field}: is a schema of type {safe_text(schema['type'])}; arguments are an object",
            field=field,
        )
    limits = jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACK_LIMIT)
    try:
        return jsonschema_rs.validator_for(schema, retriever=_refuse, pattern_options=limits)
    except ValueError as error:
        reason = getattr(error, "message", str(error))
        raise RequestError(
            f"{field}: not a JSON schema that can be used: {safe_text(reason)}", field=field
        ) from error


def _refuse(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is outside the schema")
