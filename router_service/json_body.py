"""From the bytes of a body to a JSON object that is safe to look at: strict UTF-8, no NaN, no lone surrogates.

A string with half a surrogate pair is legal JSON and illegal UTF-8; it is refused here with its path, because later
it would fail inside the tokenizer or while an answer is encoded.
"""

import json
import re
from typing import Any, NoReturn

from cluster.errors import RequestError
from router_service.openai_errors import safe_text

_MAX_KEYS = 512
"""Keys of one object. Every object that we know has fewer; more would only cost time."""
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The object in `body`. Raises RequestError naming what is wrong and, for a string, the path of its field."""
    text = _decode(body)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RequestError:
        raise
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    if _SURROGATE_ESCAPE.search(text):
        _refuse_lone_surrogates(value)
    return value


_MAX_PLAIN_NAME = 64
"""A longer key is no field of ours and is shown shortened."""


def field_path(parts: tuple[str | int, ...]) -> str:
    """("messages", 0, "content") as `messages[0].content`; keys are made printable."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            plain = part.isidentifier() and part.isascii() and len(part) <= _MAX_PLAIN_NAME
            name = part if plain else safe_text(part)
            path += f".{name}" if path else name
    return path


def _decode(body: bytes) -> str:
    if not body:
        raise RequestError("the body is empty; send a JSON object")
    if body.startswith(b"\xef\xbb\xbf"):
        raise RequestError("the body starts with a byte order mark; send plain UTF-8")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from error


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MAX_KEYS:
        raise RequestError(f"an object has {len(pairs)} keys; the limit is {_MAX_KEYS}")
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"key {safe_text(twice)} occurs twice in one object")
    return value


def _refuse_lone_surrogates(root: dict[str, Any]) -> None:
    open_values: list[tuple[tuple[str | int, ...], Any]] = [((), root)]
    while open_values:
        path, value = open_values.pop()
        if isinstance(value, str):
            _refuse_lone_surrogate(path, value)
        elif isinstance(value, list):
            open_values.extend(((*path, index), item) for index, item in enumerate(value))
        elif isinstance(value, dict):
            for key, item in value.items():
                _refuse_lone_surrogate((*path, key), key)
                open_values.append(((*path, key), item))


def _refuse_lone_surrogate(path: tuple[str | int, ...], text: str) -> None:
    found = _LONE_SURROGATE.search(text)
    if found is not None:
        field = field_path(path)
        raise RequestError(
            f"{field}: character {found.start()} is a lone surrogate (\\u{ord(found[0]):04x}), "
            "half of an escaped pair, and cannot be encoded as UTF-8",
            field=field,
        )
