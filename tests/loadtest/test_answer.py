import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loadtest.answer import AnswerFailed, TokenCounts, read_answer

USAGE = {
    "prompt_tokens": 50,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 32, "replayed_tokens": 8},
}


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chat_chunk(text: str | None, finish_reason: str | None = None) -> bytes:
    delta = {} if text is None else {"content": text}
    return event({"choices": [{"delta": delta, "finish_reason": finish_reason}], "usage": None})


def text_chunk(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"text": text, "finish_reason": finish_reason}]})


USAGE_CHUNK = event({"choices": [], "usage": USAGE})
DONE = b"data: [DONE]\n\n"


def ticking(*seconds: float) -> Callable[[], float]:
    """A clock that shows the next of these at each look."""
    times: Iterator[float] = iter(seconds)
    return lambda: next(times)


def still() -> float:
    return 1.0


def test_a_chat_is_timed_from_its_first_text_on() -> None:
    stream = [
        chat_chunk(""),  # the role
        chat_chunk("a"),
        chat_chunk("b"),
        chat_chunk("c"),
        chat_chunk(None, "stop"),
        USAGE_CHUNK,
        DONE,
    ]
    answer = read_answer(stream, ticking(0.5, 1.0, 1.25, 2.25, 2.5, 2.5, 2.5))
    assert (answer.text, answer.first_seconds, answer.gap_seconds) == ("abc", 1.0, (0.25, 1.0))


def test_a_completion_in_one_piece_has_no_gaps_in_time() -> None:
    stream = text_chunk("a") + text_chunk("b") + text_chunk("", "length") + USAGE_CHUNK + DONE
    answer = read_answer([stream], still)
    assert (answer.text, answer.first_seconds, answer.gap_seconds) == ("ab", 1.0, (0.0,))


def test_an_answer_without_text_has_its_first_token_at_the_end() -> None:
    answer = read_answer([chat_chunk(""), chat_chunk(None, "stop"), USAGE_CHUNK, DONE],
                         ticking(0.5, 2.0, 3.0, 3.0))  # fmt: skip
    assert (answer.text, answer.first_seconds, answer.gap_seconds) == ("", 2.0, ())


def test_prompt_tokens_are_split_by_where_they_came_from() -> None:
    answer = read_answer([text_chunk("a", "length"), USAGE_CHUNK, DONE], still)
    assert answer.tokens == TokenCounts(computed=10, cached=32, replayed=8, generated=3)
    assert answer.tokens.prompt == 50


def test_a_server_without_details_has_computed_everything() -> None:
    usage = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}})
    answer = read_answer([text_chunk("a", "length"), usage, DONE], still)
    assert answer.tokens == TokenCounts(computed=5, generated=1)


def test_counts_add_up_part_by_part() -> None:
    assert TokenCounts(1, 2, 3, 4) + TokenCounts(10, 20, 30, 40) == TokenCounts(11, 22, 33, 44)


FAILED = {
    "error in the stream: rank 2 died": [
        text_chunk("a"),
        event({"error": {"message": "rank 2 died", "type": "server_error"}}),
    ],
    "the stream ended before a finish_reason": [text_chunk("a"), USAGE_CHUNK, DONE],
    "the stream ended without": [text_chunk("a", "length"), USAGE_CHUNK],
    "the stream has no usage": [text_chunk("a", "length"), DONE],
    "neither UTF-8 nor JSON": [b"data: {\n\n"],
    "more tokens cached and replayed": [
        text_chunk("a", "length"),
        event({"choices": [], "usage": USAGE | {"prompt_tokens": 39}}),
        DONE,
    ],
}


@pytest.mark.parametrize(("message", "stream"), FAILED.items())
def test_a_stream_that_is_not_a_whole_answer_has_failed(message: str, stream: list[bytes]) -> None:
    with pytest.raises(AnswerFailed, match=message):
        read_answer(stream, still)
