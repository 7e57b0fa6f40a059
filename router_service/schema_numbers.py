"""Numbers of a JSON schema that its compiler would change without a word: it reads all of them as float64. Pure."""

import math
from collections.abc import Iterator
from typing import Any

from cluster.errors import RequestError
from router_service.json_body import field_path
from router_service.openai_errors import safe_text

MAX_NUMBER = 2**53
"""Integers beyond it are not all different as float64 (RFC 8259, section 6)."""
MAX_COUNT = 2**31 - 1
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Objects whose keys are names and whose values are schemas."""
_VALUES = frozenset({"const", "enum"})
_COMMENTS = frozenset({"default", "description", "example", "examples", "title", "$comment"})
"""Of which nothing is enforced."""

_Path = tuple[str | int, ...]


def check_numbers(field: str, schema: Any) -> None:
    """Raises RequestError with the path of the first that would not be kept as it is."""
    open_schemas: list[tuple[_Path, Any]] = [((), schema)]
    while open_schemas:
        path, value = open_schemas.pop()
        if isinstance(value, list):
            open_schemas.extend(_items(path, value))
        elif isinstance(value, dict):
            for name, item in value.items():
                open_schemas.extend(_checked(field, (*path, name), name, item))


def _checked(field: str, path: _Path, name: str, value: Any) -> Iterator[tuple[_Path, Any]]:
    """The schemas in what stands under this keyword."""
    if name in _BY_NAME and isinstance(value, dict):
        yield from _items(path, value)
    elif name in _BOUNDS:
        _check_number(field, path, value, MAX_NUMBER)
    elif name in _COUNTS:
        _check_number(field, path, value, MAX_COUNT)
    elif name in _VALUES:
        _check_values(field, path, value)
    elif name not in _COMMENTS:
        yield path, value


def _check_values(field: str, path: _Path, value: Any) -> None:
    open_values = [(path, value)]
    while open_values:
        place, item = open_values.pop()
        if isinstance(item, dict | list):
            open_values.extend(_items(place, item))
        elif isinstance(item, float):
            _check_number(field, place, item, math.inf)
        else:
            _check_number(field, place, item, MAX_NUMBER)


def _check_number(field: str, path: _Path, value: Any, limit: float) -> None:
    """What is no number is the compiler's to refuse."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if not abs(value) <= limit or math.isinf(value):
        inside = field_path(path)
        place = f"{field}{inside}" if inside.startswith("[") else f"{field}.{inside}"
        bound = "that float64 holds" if math.isinf(limit) else f"from {-limit} to {limit}"
        raise RequestError(
            f"{place}: {safe_text(value)} cannot be enforced; numbers {bound} can", field=place
        )


def _items(path: _Path, value: dict[str, Any] | list[Any]) -> list[tuple[_Path, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return [((*path, place), item) for place, item in pairs]
