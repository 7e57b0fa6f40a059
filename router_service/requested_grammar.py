"""Which grammar a body asks for, before anybody has compiled it, and what cannot be asked for beside one."""

import json
from dataclasses import dataclass
from typing import Any

from cluster.errors import RequestError
from cluster.grammar import GrammarKind
from router_service.grammar_fields import MAX_GRAMMAR_CHARACTERS, GrammarFields
from router_service.json_body import MAX_SCHEMA_KEYS, parse_json_object
from router_service.protocol import GenerationFields
from router_service.schema_numbers import check_numbers

_ANY_OBJECT = {"type": "object"}
_OPTIONS_OF_THE_COMPILER = "x-guidance"


@dataclass(frozen=True)
class GrammarSource:
    """field: where it stands in the body; text: JSON for the kinds "json" and "choice"; parts: what it was made of, to
    find out which of them is wrong; remedy: ends an error; preface: as of `cluster.grammar.grammar_text`."""

    field: str
    kind: GrammarKind
    text: str
    parts: tuple["GrammarSource", ...] = ()
    remedy: str = ""
    preface: str | None = None


def requested_grammar(body: GenerationFields) -> GrammarSource | None:
    """Raises RequestError: two grammars, one that is too large or no schema, or a field that cannot go with one."""
    sources = _sources(body)
    if len(sources) > 1:
        field, other = sources[1].field, sources[0].field
        raise RequestError(f"{field}: {other} is there too; send one of them", field=field)
    if not sources:
        return None
    refuse_company(body, sources[0].field)
    return sources[0]


def refuse_company(body: GenerationFields, field: str) -> None:
    """Raises RequestError for what could leave nothing to sample, or go on where the grammar ends."""
    for name, value in (
        ("ignore_eos", body.ignore_eos),
        ("allowed_token_ids", body.allowed_token_ids),
        ("bad_words", body.bad_words),
    ):
        if value:
            raise RequestError(f"{name}: cannot be used together with {field}", field=name)


def _sources(body: GrammarFields) -> list[GrammarSource]:
    found = _of_response_format(body)
    if (outputs := body.structured_outputs) is not None:
        found += _of_values(
            "structured_outputs.",
            json=_ANY_OBJECT if outputs.json_object else outputs.json_,
            regex=outputs.regex,
            choice=outputs.choice,
            grammar=outputs.grammar,
        )
    return found + _of_values(
        "guided_",
        json=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
    )


def _of_response_format(body: GrammarFields) -> list[GrammarSource]:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.json_schema is None:
        return [_of_schema("response_format", _ANY_OBJECT)]
    return [_of_schema("response_format.json_schema.schema", wanted.json_schema.schema_)]


def _of_values(
    prefix: str, *, json: Any, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[GrammarSource]:
    found = []
    if json is not None:
        found.append(_of_schema(f"{prefix}json", json))
    if regex is not None:
        found.append(GrammarSource(f"{prefix}regex", "regex", regex))
    if choice is not None:
        found.append(_source(f"{prefix}choice", "choice", choice))
    if grammar is not None:
        found.append(GrammarSource(f"{prefix}grammar", "grammar", grammar))
    return found


def _of_schema(field: str, schema: dict[str, Any] | str) -> GrammarSource:
    if isinstance(schema, str):
        schema = _parsed(field, schema)
    check_schema(field, schema)
    return _source(field, "json", schema)


def check_schema(field: str, schema: dict[str, Any]) -> None:
    """Raises RequestError for options of the compiler that it would set, and for numbers that would be changed."""
    if _OPTIONS_OF_THE_COMPILER in schema:
        raise RequestError(f"{field}: {_OPTIONS_OF_THE_COMPILER} is not supported", field=field)
    check_numbers(field, schema)


def _parsed(field: str, text: str) -> dict[str, Any]:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise _too_long(field, len(text))
    try:
        return parse_json_object(text.encode(), max_keys=MAX_SCHEMA_KEYS)
    except RequestError as error:
        message = str(error).replace("the body", "the text")
        raise RequestError(f"{field}: is no JSON schema: {message}", field=field) from error


def _source(field: str, kind: GrammarKind, value: dict[str, Any] | list[str]) -> GrammarSource:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except (RecursionError, UnicodeEncodeError) as error:
        raise RequestError(f"{field}: cannot be encoded: {error}", field=field) from error
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise _too_long(field, len(text))
    return GrammarSource(field, kind, text)


def _too_long(field: str, num_characters: int) -> RequestError:
    return RequestError(
        f"{field}: has {num_characters} characters; the limit is {MAX_GRAMMAR_CHARACTERS}",
        field=field,
    )
