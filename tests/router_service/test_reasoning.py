"""Reasoning told apart from content, the same for any division into pieces."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_service.reasoning import ReasoningSplitter, ReasoningStart
from router_service.said import Said, joined

INSIDE, IF_OPENED, OUTSIDE = ReasoningStart.INSIDE, ReasoningStart.IF_OPENED, ReasoningStart.OUTSIDE


def split(start: ReasoningStart, pieces: list[str]) -> Said:
    splitter = ReasoningSplitter(start)
    told = [splitter.add(piece) for piece in pieces]
    return joined([*told, splitter.finish()])


CASES: list[tuple[ReasoningStart, str, str, str]] = [
    (INSIDE, "\nHm.\n\nSo.\n</think>\n\nYes.\n", "Hm.\n\nSo.", "Yes.\n"),
    (INSIDE, "<think>\nHm.\n</think>Yes.", "Hm.", "Yes."),
    (INSIDE, "no end\n", "no end", ""),
    (INSIDE, "a <think> b</think>c </think> d", "a <think> b", "c </think> d"),
    (INSIDE, "</think>Yes.", "", "Yes."),
    (INSIDE, "Hm. </thi", "Hm. </thi", ""),
    (INSIDE, "", "", ""),
    (IF_OPENED, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (IF_OPENED, "\n <think>Hm.</think> Yes.", "Hm.", " Yes."),
    (IF_OPENED, "\nYes. <think>x</think>", "", "\nYes. <think>x</think>"),
    (IF_OPENED, "<thin", "", "<thin"),
    (IF_OPENED, "  \n", "", "  \n"),
    (OUTSIDE, "<think>x</think>\n", "", "<think>x</think>\n"),
]


@pytest.mark.parametrize(("start", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content_are_told_apart(
    start: ReasoningStart, text: str, reasoning: str, content: str
) -> None:
    assert split(start, [text]) == Said(text=content, reasoning=reasoning)


@pytest.mark.parametrize(("start", "text", "reasoning", "content"), CASES)
def test_single_characters_say_what_the_whole_says(
    start: ReasoningStart, text: str, reasoning: str, content: str
) -> None:
    assert split(start, list(text)) == Said(text=content, reasoning=reasoning)


def test_reasoning_is_told_as_it_comes() -> None:
    splitter = ReasoningSplitter(INSIDE)
    told = [splitter.add(piece).reasoning for piece in ["\nHm", ".\n", "So", " </th", "ink"]]
    assert told == ["Hm", ".", "\nSo", " ", ""]
    assert splitter.add(">Yes") == Said(text="Yes")


FRAGMENTS = ["<think>", "</think>", "<thi", "nk>", "</", "\n", " ", "a", "é"]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    start=st.sampled_from(list(ReasoningStart)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=10),
    places=st.lists(st.integers(0, 60), max_size=8),
)
def test_any_text_in_any_pieces_says_what_the_whole_says(
    start: ReasoningStart, fragments: list[str], places: list[int]
) -> None:
    text = "".join(fragments)
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(ends)]
    assert split(start, pieces) == split(start, [text])
