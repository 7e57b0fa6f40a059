import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.trace_replay import (
    TRACE_BLOCK_TOKENS,
    TraceRow,
    TraceScale,
    arrivals,
    read_trace,
    scaled_request,
)


def make_row(
    hash_ids: tuple[int, ...], last_length: int = 100, output_length: int = 50
) -> TraceRow:
    input_length = (len(hash_ids) - 1) * TRACE_BLOCK_TOKENS + last_length
    return TraceRow(1.5, input_length, output_length, hash_ids)


ROWS = st.builds(
    make_row,
    st.lists(st.integers(0, 50), min_size=1, max_size=8).map(tuple),
    st.integers(1, TRACE_BLOCK_TOKENS),
    st.integers(1, 2000),
)
SCALES = st.builds(
    TraceScale, block_tokens=st.integers(1, TRACE_BLOCK_TOKENS), context_tokens=st.integers(1, 3000)
)


def trace_line(**columns: object) -> str:
    row = {"timestamp": 3000, "input_length": 600, "output_length": 20, "hash_ids": [4, 9]}
    return json.dumps(row | columns)


def test_a_line_is_read_with_its_time_in_seconds() -> None:
    assert list(read_trace([trace_line()])) == [TraceRow(3.0, 600, 20, (4, 9))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of the trace"),
        (trace_line(hash_ids=[4]), "line 2 of the trace: 1 hash_ids for 2 blocks"),
        (trace_line(output_length=0), r"line 2 of the trace: .*output_length"),
        (trace_line(timestamp="now"), r"line 2 of the trace: .*timestamp"),
    ],
)
def test_a_line_that_is_no_row_is_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(read_trace([trace_line(), line]))


@settings(derandomize=True, deadline=None)
@given(ROWS, SCALES, st.integers())
def test_a_request_is_scaled_and_never_longer_than_the_context(
    row: TraceRow, scale: TraceScale, seed: int
) -> None:
    ratio = scale.block_tokens / TRACE_BLOCK_TOKENS
    num_prompt, num_output = (
        math.ceil(row.input_length * ratio - 1e-9),
        math.ceil(row.output_length * ratio - 1e-9),
    )
    request = scaled_request(row, scale, seed)
    if request is None:
        assert num_prompt + num_output > scale.context_tokens
        return
    assert len(request.prompt_token_ids) == num_prompt
    assert request.num_output_tokens == num_output
    assert num_prompt + num_output <= scale.context_tokens


@settings(derandomize=True, deadline=None)
@given(ROWS, st.integers())
def test_same_seed_is_the_same_request(row: TraceRow, seed: int) -> None:
    assert scaled_request(row, TraceScale(), seed) == scaled_request(row, TraceScale(), seed)


def test_prompts_share_as_many_tokens_as_their_rows_share_blocks() -> None:
    scale = TraceScale(block_tokens=16)
    draw = random.Random(5)
    for _ in range(50):
        common = tuple(draw.sample(range(100), draw.randint(0, 5)))
        rows = [make_row((*common, own)) for own in (200, 201)]
        one, other = (scaled_request(row, scale, 0) for row in rows)
        assert one is not None
        assert other is not None
        pairs = zip(one.prompt_token_ids, other.prompt_token_ids, strict=True)
        num_equal = next(i for i, (a, b) in enumerate(pairs) if a != b)
        assert num_equal == 16 * len(common)


def test_arrivals_leave_out_what_does_not_fit_and_keep_their_times() -> None:
    scale = TraceScale(block_tokens=16, context_tokens=40)
    rows = [
        TraceRow(seconds, len(ids) * TRACE_BLOCK_TOKENS, 32, ids)
        for seconds, ids in [(0.0, (1,)), (2.0, (1, 2, 3)), (6.0, (1, 2))]
    ]
    due = [(a.seconds, len(a.request.prompt_token_ids)) for a in arrivals(rows, scale, 0, 2.0)]
    assert due == [(0.0, 16), (3.0, 32)]
