"""From the bytes of a body to a JSON object that is safe to look at: strict UTF-8, no NaN, no lone surrogates.

A string with half a surrogate pair is legal JSON and illegal UTF-8; it is refused here with its path, because later
it would fail inside the tokenizer or while an answer is encoded.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from cluster.errors import RequestError
from router_service.openai_errors import safe_text

_MAX_KEYS = 512
"""Keys of one object. Every object that we know has fewer; more would only cost time."""
_MAX_VALUES = 2**20
"""Of one body, nested ones too. Parsing holds the interpreter: text of any length takes milliseconds, values take time
each. As token ids they are more than a context holds."""
_MAX_DEPTH = 256
"""Of nested values. What Python parses goes deeper, and fails wherever its own stack is a little longer."""
_PIECE_BYTES = 2**20
_QUOTE, _COMMA, _BRACKET, _BRACE, _END_BRACKET, _END_BRACE = b'",[{]}'
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The object in `body`. Raises RequestError naming what is wrong and, for a string, the path of its field."""
    text = _decode(body)
    _check_num_values(body)
    _check_depth(body)
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


def _check_num_values(body: bytes) -> None:
    """Values are at most the commas and opening brackets outside strings, and one."""
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) < _MAX_VALUES:
        return
    if (num_values := _num_marks_outside_strings(body) + 1) > _MAX_VALUES:
        raise RequestError(
            f"the body may hold {num_values} JSON values (commas and brackets outside strings); the "
            f"limit is {_MAX_VALUES}; send fewer prompts or messages at once"
        )


def _check_depth(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= _MAX_DEPTH:
        return
    level = deepest = 0
    for piece in _outside_strings(body):
        opened = (piece == _BRACKET) | (piece == _BRACE)
        closed = (piece == _END_BRACKET) | (piece == _END_BRACE)
        levels = level + np.cumsum(opened.astype(np.int32) - closed)
        deepest = max(deepest, int(levels.max(initial=0)))
        level = int(levels[-1]) if len(levels) else level
    if deepest > _MAX_DEPTH:
        raise RequestError(
            f"the body is nested too deeply: {deepest} values in one another; the limit is {_MAX_DEPTH}"
        )


def _num_marks_outside_strings(body: bytes) -> int:
    marks = (_COMMA, _BRACKET, _BRACE)
    return sum(int(np.count_nonzero(np.isin(p, marks))) for p in _outside_strings(body))


def _outside_strings(body: bytes) -> Iterator[np.ndarray]:
    """Its bytes without those of strings, piece by piece. Right as far as the body is JSON: outside strings a quote
    begins one, and a backslash is none."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # pairs first, so that \\" is a quote
    inside = False
    for start in range(0, len(plain), _PIECE_BYTES):
        piece = np.frombuffer(plain, np.uint8)[start : start + _PIECE_BYTES]
        within = np.logical_xor.accumulate(piece == _QUOTE) ^ inside
        yield piece[~within]
        inside = bool(within[-1])


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
            open_values.extend(
                ((*path, index), item)
                for index, item in enumerate(value)
                if isinstance(item, str | list | dict)
            )
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
