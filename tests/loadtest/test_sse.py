from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.sse import EventReader

STREAM = "\r\n".join(
    [
        ": a comment",
        "event: message",
        'data: {"text": "größer ✓"}',
        "",
        "data:no space",
        "data:  two",
        "id: 7",
        "",
        "",
        "data: [DONE]",
        "",
        "",
    ]
)
EVENTS = ['{"text": "größer ✓"}', "no space\n two", "[DONE]"]


def read_in_pieces(stream: bytes, cuts: list[int]) -> list[str]:
    reader = EventReader()
    borders = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    pieces = [stream[first:end] for first, end in pairwise(borders)]
    return [event for piece in pieces for event in reader.feed(piece)]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 10_000), max_size=40), st.sampled_from(["\n", "\r", "\r\n"]))
def test_cuts_anywhere_leave_the_same_events(cuts: list[int], line_end: str) -> None:
    assert read_in_pieces(STREAM.replace("\r\n", line_end).encode(), cuts) == EVENTS


def test_bytes_one_by_one_leave_the_same_events() -> None:
    stream = STREAM.encode()
    assert read_in_pieces(stream, list(range(len(stream)))) == EVENTS


def test_an_event_is_there_with_the_first_byte_of_its_blank_line() -> None:
    reader = EventReader()
    assert reader.feed(b"data: a\r\n") == []
    assert reader.feed(b"\r") == ["a"]
    assert reader.feed(b"\ndata: b\r\n\r\n") == ["b"]


def test_an_event_without_its_blank_line_does_not_count() -> None:
    assert EventReader().feed(b"data: a\n") == []


def test_fields_other_than_data_make_no_event() -> None:
    assert EventReader().feed(b": ping\n\nevent: x\n\nretry: 3\n\n") == []
