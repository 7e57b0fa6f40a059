import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_service.stop_strings import StopStrings

ALPHABET = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def feed(pieces: list[str], stop: list[str]) -> tuple[list[str], StopStrings]:
    strings = StopStrings(stop)
    sent = [strings.add(piece, number) for number, piece in enumerate(pieces, start=1)]
    sent.append(strings.finish("", len(pieces)))
    return sent, strings


def earliest(text: str, stop: list[str]) -> int | None:
    found = [start for string in stop if (start := text.find(string)) >= 0]
    return min(found, default=None)


@settings(max_examples=1000, derandomize=True, deadline=None)
@given(st.lists(st.text("ab", max_size=3), max_size=8), STOPS)
def test_the_text_ends_right_before_the_earliest_match(pieces: list[str], stop: list[str]) -> None:
    sent, strings = feed(pieces, stop)
    text = "".join(pieces)
    assert "".join(sent) == text[: earliest(text, stop)]
    assert (strings.match is None) == (earliest(text, stop) is None)


@settings(max_examples=500, derandomize=True, deadline=None)
@given(st.lists(st.text("ab", max_size=3), max_size=8), STOPS)
def test_the_match_names_the_first_token_with_a_whole_stop_string_at_that_place(
    pieces: list[str], stop: list[str]
) -> None:
    _, strings = feed(pieces, stop)
    start = earliest("".join(pieces), stop)
    complete = [
        number
        for number in range(1, len(pieces) + 1)
        if start is not None and earliest("".join(pieces[:number]), stop) == start
    ]
    assert (strings.match and strings.match.num_tokens) == min(complete, default=None)


@settings(max_examples=500, derandomize=True, deadline=None)
@given(ALPHABET, STOPS)
def test_token_borders_do_not_change_the_text(text: str, stop: list[str]) -> None:
    one_by_one, _ = feed(list(text), stop)
    at_once, _ = feed([text], stop)
    assert "".join(one_by_one) == "".join(at_once)


def test_text_that_could_begin_a_match_is_held_back() -> None:
    strings = StopStrings(["END"])
    assert strings.add("the E", 1) == "the "


def test_held_text_is_sent_as_soon_as_no_match_can_come() -> None:
    strings = StopStrings(["END"])
    strings.add("the E", 1)
    assert strings.add("x", 2) == "Ex"


def test_held_text_is_flushed_at_the_end() -> None:
    sent, strings = feed(["the E", "N"], ["END"])
    assert (sent, strings.match) == (["the ", "", "EN"], None)


def test_a_longer_stop_string_that_starts_earlier_wins_over_one_inside_it() -> None:
    sent, _ = feed(["x", "a", "b", "c", "d"], ["abcd", "bc"])
    assert "".join(sent) == "x"


def test_a_longer_stop_string_that_does_not_come_leaves_the_inner_match() -> None:
    sent, strings = feed(["a", "b", "c", "x", "y"], ["abcd", "bc"])
    assert "".join(sent) == "a"
    assert strings.match is not None
    assert strings.match.num_tokens == 3


def test_of_two_matches_at_one_place_the_shorter_ends_the_generation() -> None:
    _, strings = feed(["a", "b", "c"], ["abc", "ab"])
    assert strings.match is not None
    assert strings.match.num_tokens == 2


@pytest.mark.parametrize("pieces", [["a", "b"], [], [""]])
def test_without_stop_strings_text_passes_unchanged(pieces: list[str]) -> None:
    sent, _ = feed(pieces, [])
    assert sent == [*pieces, ""]
