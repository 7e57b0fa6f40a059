"""What the checks of the openai SDK for Python share."""

from collections.abc import Iterable
from typing import Any

from checking import Json, Server, same, without
from openai import OpenAI

OWN = ("id", "created", "created_at")
"""Of every answer."""
CALL_OWN = ("id", "call_id")
"""Of every call and every item of an output."""


def client_of(server: Server, **options: Any) -> OpenAI:
    fields = {"base_url": server.base_url, "api_key": server.api_key, "max_retries": 0}
    return OpenAI(**(fields | options))


def same_body(answer: Any, wanted: Json) -> None:
    got = answer.model_dump(exclude_unset=True)
    same(without(got, *OWN), without(wanted, *OWN), "the body")
    same(type(answer.id), str, "the type of its id")


def finish_reasons(chunks: Iterable[Any]) -> list[str]:
    return [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]


def nameless(value: Any) -> Any:
    """Without the ids that each answer gives its calls and items anew, at any depth."""
    if isinstance(value, dict):
        return {k: nameless(v) for k, v in value.items() if k not in (*OWN, *CALL_OWN)}
    if isinstance(value, list):
        return [nameless(entry) for entry in value]
    return value
