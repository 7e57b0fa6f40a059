"""Which tokens of a step attend to which KV rows, worked out once per step; reading the rows, once per layer.

Letters: T tokens, B sequences of a span, t tokens per sequence, S KV rows (a multiple of KV_TILE), Hd heads, Hk KV
heads, w and v widths of keys and values.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from expert_workers.kv_pool import KVPool
from expert_workers.model.numerics import KV_TILE, Numerics
from expert_workers.model.rotary import Rotation
from expert_workers.step_inputs import StepInputs

QUERY_BLOCK = 128
"""Tokens of a prefill chunk that attend together: bounds the score matrix and skips rows that none of them sees."""


@dataclass(frozen=True)
class QueryBlock:
    """Tokens that attend together to the first S' ≤ S rows of their span.

    tokens: [B · t] int64, rows of the step; masked: [B, t, 1, S'] bool, true where a query may not look
    """

    tokens: Tensor
    num_tokens_per_seq: int
    masked: Tensor


@dataclass(frozen=True)
class KVSpan:
    """KV rows of B sequences, read together. slots: [B, S] int64; padding: [B, S, 1] bool, beyond a sequence's end."""

    slots: Tensor
    padding: Tensor
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True)
class WrittenTokens:
    """Tokens of the step whose KV is written; that of the others is in the pool already.

    indices: [T'] int64, rows of the step; None: all of them. rotation: theirs. slots: [T'] int64
    """

    indices: Tensor | None
    rotation: Rotation
    slots: Tensor

    @staticmethod
    def of(inputs: StepInputs, rotation: Rotation) -> "WrittenTokens":
        indices = inputs.written_tokens
        own = rotation if indices is None else rotation.select(indices)
        return WrittenTokens(indices, own, inputs.slot_mapping)

    def rows(self, x: Tensor) -> Tensor:
        """x: [T, H]. Returns [T', H]."""
        return x if self.indices is None else x.index_select(0, self.indices)


@dataclass(frozen=True)
class AttentionPlan:
    """What every layer's attention needs to know about the step.

    rotation: of the step's tokens
    written:  those whose KV is written, and where
    spans:    single tokens (decodes) of sequences of similar length share one, every other chunk has its own
    """

    rotation: Rotation
    written: WrittenTokens
    spans: tuple[KVSpan, ...]

    @staticmethod
    def of(inputs: StepInputs, rotation: Rotation, block_size: int) -> "AttentionPlan":
        spans = [_decode_span(inputs, block_size, chunks) for chunks in _decode_groups(inputs)]
        starts = inputs.cu_seqlens_q
        for chunk in range(len(inputs.seq_lens)):
            if starts[chunk + 1] - starts[chunk] > 1:
                spans.append(_prefill_span(inputs, block_size, chunk))
        return AttentionPlan(rotation, WrittenTokens.of(inputs, rotation), tuple(spans))


@dataclass(frozen=True)
class KeysAndValues:
    """keys: [B, Hk, S, w]; values: [B, Hk, S, v]."""

    keys: Tensor
    values: Tensor


class LayerRows(Protocol):
    """One layer's rows in the pool as keys and values."""

    @property
    def value_width(self) -> int: ...

    def gather(self, span: KVSpan) -> KeysAndValues: ...


def gather_rows(kv_pool: KVPool, layer: int, span: KVSpan) -> Tensor:
    """[B, S, row width]. Rows beyond a sequence's end are zero, whatever their slots held before."""
    return kv_pool.gather(layer, span.slots).masked_fill_(span.padding, 0.0)


def attend(plan: AttentionPlan, queries: Tensor, kv_rows: LayerRows, numerics: Numerics) -> Tensor:
    """Every token of the step over the rows of its own sequence. queries: [T, Hd, w], scaled. Returns [T, Hd, v]."""
    values = queries.new_empty(*queries.shape[:2], kv_rows.value_width)
    for span in plan.spans:
        kv = kv_rows.gather(span)
        for block in span.blocks:
            num_seqs, num_tokens, _, num_rows = block.masked.shape
            chosen = queries.index_select(0, block.tokens)
            chosen = chosen.view(num_seqs, num_tokens, *queries.shape[1:])
            attended = numerics.attend(
                chosen, kv.keys[:, :, :num_rows], kv.values[:, :, :num_rows], block.masked
            )
            values.index_copy_(0, block.tokens, attended.flatten(0, 1))
    return values


def _decode_groups(inputs: StepInputs) -> Iterator[list[int]]:
    """Chunks of one token, those together whose lengths round up to the same power of two of tiles."""
    groups: dict[int, list[int]] = defaultdict(list)
    starts = inputs.cu_seqlens_q
    for chunk, length in enumerate(inputs.seq_lens):
        if starts[chunk + 1] - starts[chunk] == 1:
            groups[((length - 1) // KV_TILE).bit_length()].append(chunk)
    yield from groups.values()


def _decode_span(inputs: StepInputs, block_size: int, chunks: list[int]) -> KVSpan:
    slots, padding = _slots(inputs, block_size, chunks)
    tokens = torch.tensor([inputs.cu_seqlens_q[chunk] for chunk in chunks], device=inputs.device)
    masked = padding.view(len(chunks), 1, 1, -1)
    return KVSpan(slots, padding, (QueryBlock(tokens, 1, masked),))


def _prefill_span(inputs: StepInputs, block_size: int, chunk: int) -> KVSpan:
    slots, padding = _slots(inputs, block_size, [chunk])
    first_token, end_token = inputs.cu_seqlens_q[chunk : chunk + 2]
    first_position = inputs.seq_lens[chunk] - (end_token - first_token)
    columns = torch.arange(slots.shape[1], device=inputs.device)
    blocks = []
    for start in range(first_token, end_token, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, end_token)
        num_rows = _whole_tiles(first_position + end - first_token)
        masked = columns[:num_rows] > inputs.positions[start:end, None]
        tokens = torch.arange(start, end, device=inputs.device)
        blocks.append(QueryBlock(tokens, end - start, masked[None, :, None, :]))
    return KVSpan(slots, padding, tuple(blocks))


def _slots(inputs: StepInputs, block_size: int, chunks: list[int]) -> tuple[Tensor, Tensor]:
    """slots [B, S] of the chunks' sequences from position 0, and [B, S, 1]: whether a row is beyond the sequence.

    Slots beyond the sequence are any valid ones; what they hold is never used.
    """
    lengths = [inputs.seq_lens[chunk] for chunk in chunks]
    num_rows = _whole_tiles(max(lengths))
    num_blocks = -(-num_rows // block_size)
    tables = pad_sequence(
        [inputs.block_tables[chunk][:num_blocks] for chunk in chunks], batch_first=True
    )
    tables = F.pad(tables, (0, num_blocks - tables.shape[1]))
    offsets = torch.arange(block_size, device=inputs.device)
    slots = (tables[:, :, None] * block_size + offsets).flatten(1)[:, :num_rows]
    ends = torch.tensor(lengths, device=inputs.device)
    padding = torch.arange(num_rows, device=inputs.device) >= ends[:, None]
    return slots.contiguous(), padding[:, :, None]


def _whole_tiles(num_rows: int) -> int:
    return -(-num_rows // KV_TILE) * KV_TILE
