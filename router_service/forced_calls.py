"""`tool_choice` "required" or a function: the grammar that an answer is held to so that it calls."""

import json
from collections.abc import Mapping
from typing import Any

from cluster.errors import RequestError
from router_service.call_grammar import CallGrammar
from router_service.grammar_fields import MAX_GRAMMAR_CHARACTERS
from router_service.openai_errors import safe_text
from router_service.protocol import ChatBody
from router_service.reasoning import ReasoningStart
from router_service.requested_grammar import (
    GrammarSource,
    check_schema,
    refuse_company,
)
from router_service.tool_calls.call_format import CallLayout
from router_service.tool_fields import FunctionDefinition, chosen_function

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def forced_calls(
    body: ChatBody,
    layout: CallLayout,
    token_ids: Mapping[str, int],
    reasoning: ReasoningStart | None,
) -> GrammarSource:
    """Of a body that forces calls. See CallGrammar. Raises RequestError: a schema with options of its own, too many
    characters, or a field that cannot go with a grammar."""
    refuse_company(body, "tool_choice")
    fields = _schema_fields(body)
    schemas = {name: schema for name, (_, schema) in fields.items()}
    grammar = CallGrammar(layout, token_ids, reasoning)
    try:
        text = grammar.text(schemas, is_repeated=body.max_calls is None)
        text.encode()
        parts = tuple(
            GrammarSource(field, "json", json.dumps(schema, ensure_ascii=False))
            for field, schema in fields.values()
        )
    except (RecursionError, UnicodeEncodeError) as error:
        raise RequestError(f"tools: cannot be encoded: {error}", field="tools") from error
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            f"tools: with tool_choice {safe_text(body.tool_choice)} they make a grammar of {len(text)} "
            f"characters, the limit is {MAX_GRAMMAR_CHARACTERS}{_REMEDY}",
            field="tools",
        )
    return GrammarSource("tools", "lark", text, parts, _REMEDY)


_REMEDY = '; make them simpler, or send tool_choice "auto"'


def _schema_fields(body: ChatBody) -> dict[str, tuple[str, dict[str, Any]]]:
    """Where in the body the schema of each function that may be called stands, and the schema."""
    chosen = chosen_function(body.tool_choice)
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for index, tool in enumerate(body.offered_tools):
        name, field = tool.function.name, f"tools[{index}].function.parameters"
        if chosen in (None, name):
            check_schema(field, tool.function.parameters or {})
            found[name] = (field, _schema(tool.function))
    return found


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    """Of an object in any case; a function without parameters takes none (OpenAI)."""
    return {"type": "object", **function.parameters} if function.parameters else _NO_ARGUMENTS
