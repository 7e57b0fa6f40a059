"""Requests of a trace in Mooncake's columns, scaled down: blocks become shorter, their ids and arrival times stay.

A row is a JSON object with `timestamp` (ms from the start), `input_length`, `output_length` (tokens) and `hash_ids`,
one per block of 512 tokens. An id names its block together with everything before it (Qin et al., "Mooncake: Trading
More Storage for Less Computation", FAST '25).
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec

from loadtest.workload import PromptRequest, check_token_ids

TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceRow:
    arrival_seconds: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True)
class TraceScale:
    """`block_tokens` of ours stand for one block of the trace; outputs shrink in the same proportion."""

    block_tokens: int = 16
    lowest_token_id: int = 16
    vocab_size: int = 3000
    context_tokens: int = 4096

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= TRACE_BLOCK_TOKENS:
            raise ValueError(
                f"block_tokens is {self.block_tokens}; it must be from 1 to {TRACE_BLOCK_TOKENS}"
            )
        check_token_ids(self.lowest_token_id, self.vocab_size)


class _Columns(msgspec.Struct):
    timestamp: float
    input_length: Annotated[int, msgspec.Meta(gt=0)]
    output_length: Annotated[int, msgspec.Meta(gt=0)]
    hash_ids: tuple[int, ...]


def read_trace(lines: Iterable[str]) -> Iterator[TraceRow]:
    """Rows in the order of the file. Raises ValueError with the number of the line."""
    for number, line in enumerate(lines, start=1):
        try:
            columns = msgspec.json.decode(line, type=_Columns)
        except msgspec.MsgspecError as error:
            raise ValueError(f"line {number} of the trace: {error}") from error
        num_blocks = -(-columns.input_length // TRACE_BLOCK_TOKENS)
        if len(columns.hash_ids) != num_blocks:
            raise ValueError(
                f"line {number} of the trace: {len(columns.hash_ids)} hash_ids for {num_blocks} blocks"
            )
        yield TraceRow(
            columns.timestamp / 1000, columns.input_length, columns.output_length, columns.hash_ids
        )


def scaled_request(row: TraceRow, scale: TraceScale, seed: int) -> PromptRequest | None:
    """None when it does not fit the context. The last block is cut as the row's is, to one token at least."""
    num_full = len(row.hash_ids) - 1
    last_length = row.input_length - num_full * TRACE_BLOCK_TOKENS
    num_prompt_tokens = num_full * scale.block_tokens + _shrunk(last_length, scale)
    num_output_tokens = _shrunk(row.output_length, scale)
    if num_prompt_tokens + num_output_tokens > scale.context_tokens:
        return None
    blocks = (_block(hash_id, scale, seed) for hash_id in row.hash_ids)
    token_ids = tuple(token_id for block in blocks for token_id in block)
    return PromptRequest(token_ids[:num_prompt_tokens], num_output_tokens)


@dataclass(frozen=True)
class Arrival:
    """A request and when it is due, in seconds from the start."""

    seconds: float
    request: PromptRequest


def arrivals(
    rows: Iterable[TraceRow], scale: TraceScale, seed: int, speed: float
) -> Iterator[Arrival]:
    """The rows that fit the context, `speed` times as fast as they were recorded."""
    for row in rows:
        request = scaled_request(row, scale, seed)
        if request is not None:
            yield Arrival(row.arrival_seconds / speed, request)


def _block(hash_id: int, scale: TraceScale, seed: int) -> list[int]:
    draw = random.Random(f"block {seed} {hash_id}")
    return [
        draw.randrange(scale.lowest_token_id, scale.vocab_size) for _ in range(scale.block_tokens)
    ]


def _shrunk(num_tokens: int, scale: TraceScale) -> int:
    """Rounded up, so that nothing becomes empty."""
    return -(-num_tokens * scale.block_tokens // TRACE_BLOCK_TOKENS)
