"""From the bytes of a body to a JSON object that is safe to look at: strict UTF-8, no NaN, no lone surrogates.

A string with half a surrogate pair is legal JSON and illegal UTF-8; it is refused here with its path, because later
it would fail inside the tokenizer or while an answer is encoded.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cluster.errors import RequestError
from router_service.openai_errors import safe_text

_MAX_KEYS = 512
"""Of one object. Every object that we know has fewer; more would only cost time."""
MAX_BIASES = 1024
MAX_SCHEMA_KEYS = 4096
_MAX_KEYS_WITHIN = {
    "logit_bias": MAX_BIASES,
    **dict.fromkeys(
        ("guided_json", "output_config", "response_format", "structured_outputs", "text", "tools"),
        MAX_SCHEMA_KEYS,
    ),
}
"""Of one object at or below these fields, where clients put names of their own."""
MAX_DIGITS = 4000
"""Of an integer; Python itself reads few more."""
_MAX_VALUES = 2**20
"""Of one body, nested ones too. Parsing holds the interpreter: text of any length takes milliseconds, values take time
each. As token ids they are more than a context holds."""
_MAX_DEPTH = 256
"""Of nested values. What Python parses goes deeper, and fails wherever its own stack is a little longer."""
_Path = tuple[str | int, ...]
_Placed = tuple[_Path, Any]
_PIECE_BYTES = 2**20
_QUOTE, _COMMA, _BRACKET, _BRACE, _END_BRACKET, _END_BRACE = b'",[{]}'
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json_object(body: bytes, *, max_keys: int = _MAX_KEYS) -> dict[str, Any]:
    """The object in `body`. Raises RequestError naming what is wrong and the path of its field.

    max_keys: of one object, where nothing else is said of its field.
    """
    text = _decode(body)
    _check_num_values(body)
    _check_depth(body)
    marks = _Marks()
    value = _parsed(text, marks)
    if marks.are_set:
        _refuse_marked(value, max_keys)
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


@dataclass(frozen=True)
class _Unfit:
    """Stands where something is that cannot be there, until it is known where that is."""

    reason: str
    keys: tuple[str, ...] = ()
    """That lead to it, from there on."""


class _Marks:
    """Hooks of one parse. Whether some value has to be looked for: the parser does not say where in the body it is."""

    def __init__(self) -> None:
        self.are_set = False

    def constant(self, name: str) -> _Unfit:
        return self._unfit(f"{name} is not a JSON number")

    def integer(self, digits: str) -> int | _Unfit:
        num_digits = len(digits.removeprefix("-"))
        if num_digits <= MAX_DIGITS:
            return int(digits)
        return self._unfit(f"is an integer of {num_digits} digits; the limit is {MAX_DIGITS}")

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Unfit:
        value = dict(pairs)
        if len(value) < len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            return self._unfit("occurs twice in one object", twice)
        self.are_set |= len(value) > _MAX_KEYS
        return value

    def _unfit(self, reason: str, *keys: str) -> _Unfit:
        self.are_set = True
        return _Unfit(reason, keys)


def _parsed(text: str, marks: _Marks) -> Any:
    load = partial(json.loads, parse_constant=marks.constant, object_pairs_hook=marks.object)
    try:
        try:
            return load(text)
        except json.JSONDecodeError:
            raise
        except ValueError:  # Python refuses to read so long an integer, and does not say where
            return load(text, parse_int=marks.integer)
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error


def _refuse_marked(root: Any, max_keys: int) -> None:
    """Raises RequestError for the first in the order of the body."""
    open_items: list[Iterator[_Placed]] = [iter([((), root)])]
    while open_items:
        if (placed := next(open_items[-1], None)) is None:
            open_items.pop()
            continue
        path, value = placed
        if isinstance(value, _Unfit):
            raise _refused((*path, *value.keys), value.reason)
        if isinstance(value, dict):
            limit = _MAX_KEYS_WITHIN.get(str(path[0]), max_keys) if path else max_keys
            if len(value) > limit:
                raise _refused(path, f"has {len(value)} keys; the limit is {limit}")
        open_items.append(_items(path, value))


def _items(path: _Path, value: Any) -> Iterator[_Placed]:
    if isinstance(value, dict):
        return (((*path, name), item) for name, item in value.items())
    if isinstance(value, list):
        return (((*path, index), item) for index, item in enumerate(value))
    return iter(())


def _refused(path: tuple[str | int, ...], reason: str) -> RequestError:
    field = field_path(path)
    return RequestError(f"{field or 'the body'}: {reason}", field=field or None)


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
