"""Stop strings do not count before min_tokens: on the text itself, and in answers."""

from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_service.stop_strings import StopStrings
from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    chat_body,
    completion_body,
    events,
    stream_text,
    tokens,
)

TEXT = " one two three four five six seven eight"
PIECES = st.lists(st.text("ab", max_size=3), max_size=8)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def feed(pieces: list[str], stop: list[str], min_tokens: int) -> tuple[str, StopStrings]:
    strings = StopStrings(stop, min_tokens=min_tokens)
    sent = [strings.add(piece, number) for number, piece in enumerate(pieces, start=1)]
    return "".join([*sent, strings.finish("", len(pieces))]), strings


def starts_of_matches(text: str, stop: list[str], num_exempt: int) -> list[int]:
    """Places of matches that end behind the first `num_exempt` characters."""
    return [
        start
        for string in stop
        for start in range(len(text))
        if text.startswith(string, start) and start + len(string) > num_exempt
    ]


@settings(max_examples=1000, derandomize=True, deadline=None)
@given(PIECES, STOPS, st.integers(0, 9))
def test_the_text_ends_before_the_earliest_match_that_is_complete_after_min_tokens(
    pieces: list[str], stop: list[str], min_tokens: int
) -> None:
    sent, strings = feed(pieces, stop, min_tokens)
    text, exempt = "".join(pieces), len("".join(pieces[:min_tokens]))
    starts = starts_of_matches(text, stop, exempt)
    assert sent == text[: min(starts, default=None)]
    assert (strings.match is None) == (not starts)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(PIECES, STOPS, st.integers(0, 9))
def test_the_token_that_ends_a_choice_is_beyond_min_tokens(
    pieces: list[str], stop: list[str], min_tokens: int
) -> None:
    _, strings = feed(pieces, stop, min_tokens)
    assert strings.match is None or strings.match.num_tokens > min_tokens


def test_a_match_that_begins_before_min_tokens_and_ends_after_counts() -> None:
    assert feed(["x", "E", "N", "D", "y"], ["END"], 3)[0] == "x"
    assert feed(["x", "E", "N", "D", "y"], ["END"], 4)[0] == "xENDy"


def choice(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = client.post(path, json=body).json()["choices"][0]
    return answer


@pytest.mark.parametrize(("path", "make_body"), [(COMPLETIONS, completion_body), (CHAT, chat_body)])
def test_an_answer_runs_over_a_stop_string_before_min_tokens(
    path: str, make_body: Any, client: httpx.Client
) -> None:
    fields = {"stop": ["two", "six"], "max_tokens": len(tokens(TEXT)), "stream": True}
    early = len(tokens(" one two"))
    texts = [
        stream_text(events(client.post(path, json=make_body(min_tokens=n, **fields))))
        for n in (early - 1, early)
    ]
    assert texts == [" one ", " one two three four five "]


def test_the_engine_is_told_of_the_later_match_only(
    client: httpx.Client, engine: ScriptedEngine
) -> None:
    early = len(tokens(" one two"))
    body = completion_body(stop="two", max_tokens=200, min_tokens=early)
    answer = client.post(COMPLETIONS, json=body).json()
    assert answer["choices"][0]["text"] == f"{TEXT} one "
    finish = engine.finish_of(f"{answer['id']}-0")
    assert finish.num_output_tokens == len(tokens(TEXT)) + early


def test_more_min_tokens_never_end_an_answer_earlier(client: httpx.Client) -> None:
    lengths = [
        len(
            choice(client, COMPLETIONS, completion_body(stop="e", max_tokens=40, min_tokens=n))[
                "text"
            ]
        )
        for n in range(0, 40, 3)
    ]
    assert all(shorter <= longer for shorter, longer in pairwise(lengths))
    assert lengths[0] < lengths[-1]
