"""The scanner takes what decoders take, and of everything else the longest beginning that could still become it."""

import json
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_service.tool_calls.json_scanner import MAX_DEPTH, MAX_NUMBER_LENGTH, JsonScanner


def scanned(text: str, pieces: int = 1) -> tuple[str, bool]:
    """What it takes, in pieces of random lengths, and whether that is whole."""
    scanner, place, rng = JsonScanner(), 0, random.Random(pieces)
    ends = [*sorted(rng.choices(range(len(text) + 1), k=pieces - 1)), len(text)]
    for end in ends:
        place = scanner.scan(text[:end], place)
        if place < end:
            break
    return text[:place], scanner.has_ended


def is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text.encode())
    except (msgspec.MsgspecError, UnicodeError):
        return False
    return True


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a": oops}', '{"a": '),
        ('{"a": 01}', '{"a": 0'),
        ('{"a": 1.}', '{"a": 1.'),
        ('{"a": -}', '{"a": -'),
        ('{"a": 1e}', '{"a": 1e'),
        ('{"a": .5}', '{"a": '),
        ('{"a": +1}', '{"a": '),
        ('{"a": nul}', '{"a": nul'),
        ('{"a": NaN}', '{"a": '),
        ('{"a" 1}', '{"a" '),
        ('{"a": 1,}', '{"a": 1,'),
        ("{,}", "{"),
        ("{'a': 1}", "{"),
        ('{"a": [1,]}', '{"a": [1,'),
        ('{"a": [}', '{"a": ['),
        ('{"a": "x\ny"}', '{"a": "x'),
        ('{"a": "\\x"}', '{"a": "\\'),
        ('{"a": "\\u12g4"}', '{"a": "\\u12'),
        ('{"a": "\\ud83d"}', '{"a": "\\ud83d'),
        ('{"a": "\\ud83d\\n"}', '{"a": "\\ud83d\\'),
        ('{"a": "\\ud83dx"}', '{"a": "\\ud83d'),
        ('{"a": "\\ude00"}', '{"a": "\\ud'),
        ('{"a": 1]', '{"a": 1'),
    ],
)
def test_it_stops_at_what_cannot_come(text: str, taken: str) -> None:
    assert scanned(text) == scanned(text, pieces=5) == (taken, False)
    assert not is_json(text)


def test_it_ends_with_the_value() -> None:
    assert scanned('{"a": {}}, {}') == ('{"a": {}}', True)


@pytest.mark.parametrize(
    "text", ['{"\\ud83d\\ude00": "\\u00e9\\/"}', '{"a":-0.5E+3,"b":[ ]}', "{ }"]
)
def test_rare_forms_are_taken(text: str) -> None:
    assert scanned(text) == (text, True)
    assert is_json(text)


def test_depth_and_length_of_numbers_have_a_bound() -> None:
    deep = '{"a": ' + "[" * MAX_DEPTH
    assert scanned(deep) == (deep[:-1], False)
    long = '{"a": ' + "1" * (MAX_NUMBER_LENGTH + 1)
    assert scanned(long)[0] == long[:-1]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    value=st.dictionaries(st.text(), VALUES, max_size=4),
    is_ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
    pieces=st.integers(1, 20),
)
def test_every_object_is_taken_in_any_pieces(
    value: dict[str, object], is_ascii: bool, indent: int | None, pieces: int
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert scanned(text, pieces) == (text, True)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    value=st.dictionaries(st.text(max_size=3), VALUES, max_size=3),
    place=st.integers(0, 200),
    inserted=st.sampled_from([*'{}[]",:\\0-.eu \n', "nul", "true", "\\ud83d", ""]),
    num_removed=st.integers(0, 2),
)
def test_a_changed_object_is_taken_as_a_whole_exactly_if_decoders_take_it(
    value: dict[str, object], place: int, inserted: str, num_removed: int
) -> None:
    text = json.dumps(value)
    place %= len(text)
    changed = text[:place] + inserted + text[place + num_removed :]
    taken, is_whole = scanned(changed)
    whole = is_whole and not changed[len(taken) :].strip(" \t\r\n")
    assert whole == (is_json(changed) and changed.lstrip().startswith("{"))
