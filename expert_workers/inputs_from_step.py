"""From the descriptor that all ranks share to one rank's chunks and tensors. Pure functions; refuses before it builds.

Letters: S chunks of the step, C chunks of this rank, T its tokens, L MoE layers, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import CellError
from cluster.routes import ExpertRoutes, RouteShape
from cluster.types import DispatchMode
from cluster.worker_messages import StepDescriptor
from expert_workers.step_inputs import StepInputs

Int32Array = npt.NDArray[np.int32]


class StepRefusedError(CellError):
    """A step that this rank cannot run as described. Raised before its first exchange."""


@dataclass(frozen=True)
class StepLimits:
    """What a descriptor is checked against, the same on every rank."""

    ep_size: int
    placement_epoch: int
    dispatch: DispatchMode
    vocab_size: int
    max_position_embeddings: int
    num_kv_blocks: int
    block_size: int


@dataclass(frozen=True, eq=False)
class Chunk:
    """One request's tokens in one step. `index`: its place in the descriptor. Arrays are views of the descriptor.

    With fragment_ids it is planned, with a route_id its routes are replayed through a negotiated dispatch, with neither
    the gate chooses. The KV of its first `num_suppressed` tokens is there already.

    score_target_ids: [n] of the first n tokens of the chunk the score of this next token is asked
    input_ids: [num_tokens]; block_table: [blocks from position 0]
    """

    index: int
    seq_id: int
    first_position: int
    route_id: int | None
    fragment_ids: tuple[int, ...]
    samples: bool
    num_suppressed: int
    score_target_ids: Int32Array
    input_ids: Int32Array
    block_table: Int32Array

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def end_position(self) -> int:
        """Of the token after the chunk: the one that is sampled, if any."""
        return self.first_position + self.num_tokens


def check_step(step: StepDescriptor, limits: StepLimits) -> None:
    """All that can be known without a rank's own state, so that every rank refuses a bad step alike.

    Raises StepRefusedError naming the column, the value and the limit.
    """
    _check_agreement(step, limits)
    _check_columns(step)
    _check_range(step, "ranks", step.ranks, 0, limits.ep_size)
    _check_range(step, "num_tokens", step.num_tokens, 1, 2**31)
    _check_range(step, "samples", step.samples, 0, 2)
    _check_range(step, "num_suppressed", step.num_suppressed, 0, 2**31)
    _check_range(step, "score_lens", step.score_lens, 0, 2**31)
    _check_range(step, "first_positions", step.first_positions, 0, limits.max_position_embeddings)
    _check_range(step, "block_table_lens", step.block_table_lens, 1, 2**31)
    _check_range(step, "fragment_lens", step.fragment_lens, 0, 2**31)
    _check_sums(step)
    _check_order(step)
    _check_not_longer(step, "num_suppressed", step.num_suppressed)
    _check_not_longer(step, "score_lens", step.score_lens)
    _check_fragments(step)
    _check_range(step, "input_ids", step.input_ids, 0, limits.vocab_size)
    _check_range(step, "score_target_ids", step.score_target_ids, 0, limits.vocab_size)
    _check_range(step, "block_tables", step.block_tables, 0, limits.num_kv_blocks)
    ends = step.first_positions.astype(np.int64) + step.num_tokens
    _check_range(step, "last positions", ends - 1, 0, limits.max_position_embeddings)
    room = step.block_table_lens.astype(np.int64) * limits.block_size
    if (ends > room).any():
        chunk = int(np.argmax(ends > room))
        raise StepRefusedError(
            f"step {step.step_id}: seq {step.seq_ids[chunk]} writes up to position {ends[chunk] - 1}, "
            f"its block table has room for {room[chunk]} tokens"
        )


def chunks_of_rank(step: StepDescriptor, rank: int) -> list[Chunk]:
    """This rank's chunks of a checked step, in the descriptor's order."""
    token_starts = _starts(step.num_tokens)
    block_starts = _starts(step.block_table_lens)
    fragment_starts = _starts(step.fragment_lens)
    score_starts = _starts(step.score_lens)
    return [
        Chunk(
            index=int(i),
            seq_id=int(step.seq_ids[i]),
            first_position=int(step.first_positions[i]),
            route_id=int(step.route_ids[i]) if step.route_ids[i] >= 0 else None,
            fragment_ids=tuple(
                step.fragment_ids[fragment_starts[i] : fragment_starts[i + 1]].tolist()
            ),
            samples=bool(step.samples[i]),
            num_suppressed=int(step.num_suppressed[i]),
            score_target_ids=step.score_target_ids[score_starts[i] : score_starts[i + 1]],
            input_ids=step.input_ids[token_starts[i] : token_starts[i + 1]],
            block_table=step.block_tables[block_starts[i] : block_starts[i + 1]],
        )
        for i in np.flatnonzero(step.ranks == rank)
    ]


@dataclass(frozen=True)
class PlannedChunk:
    """What every rank knows of a chunk that is planned, whatever its home rank."""

    seq_id: int
    source: int
    num_tokens: int
    fragment_ids: tuple[int, ...]


def planned_chunks_of_step(step: StepDescriptor) -> list[PlannedChunk]:
    """Those of all ranks, of a checked step, in its order: by source."""
    starts = _starts(step.fragment_lens)
    return [
        PlannedChunk(
            seq_id=int(step.seq_ids[i]),
            source=int(step.ranks[i]),
            num_tokens=int(step.num_tokens[i]),
            fragment_ids=tuple(step.fragment_ids[starts[i] : starts[i + 1]].tolist()),
        )
        for i in np.flatnonzero(step.fragment_lens)
    ]


def has_dynamic_chunks(step: StepDescriptor) -> bool:
    """Some chunk, on whatever rank, is dispatched without a plan."""
    return bool((step.fragment_lens == 0).any())


@dataclass(frozen=True)
class InputsBuilder:
    """Where this rank's tensors go and what its routes look like."""

    block_size: int
    route_shape: RouteShape
    device: torch.device

    def build(
        self,
        gate_chunks: Sequence[Chunk],
        replay_chunks: Sequence[Chunk],
        replayed: ExpertRoutes,
        planned_chunks: Sequence[Chunk] = (),
    ) -> StepInputs:
        """Chunks of the gate first, then those that replay negotiated, then the planned ones.

        replayed: routes of the second kind, [T', L, K].
        """
        chunks = [*gate_chunks, *replay_chunks, *planned_chunks]
        positions = _joined([np.arange(c.first_position, c.end_position) for c in chunks])
        slots = _joined([self._written_slots(chunk) for chunk in chunks])
        cu_seqlens_q = np.concatenate(([0], np.cumsum([c.num_tokens for c in chunks]))).astype(
            np.int64
        )
        last = [
            end - 1 for c, end in zip(chunks, cu_seqlens_q[1:].tolist(), strict=True) if c.samples
        ]
        return StepInputs(
            input_ids=self._tensor(_joined([c.input_ids for c in chunks])),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            written_tokens=self._written_tokens(chunks),
            cu_seqlens_q=tuple(cu_seqlens_q.tolist()),
            seq_lens=tuple(c.end_position for c in chunks),
            block_tables=tuple(self._tensor(c.block_table.astype(np.int64)) for c in chunks),
            num_gate_tokens=sum(c.num_tokens for c in gate_chunks),
            replay_topk_ids=self._tensor(replayed.topk_ids.astype(np.int64)),
            replay_topk_weights=self._tensor(replayed.topk_weights.astype(np.float32)),
            last_token_indices=self._tensor(np.array(last, np.int64)),
        )

    def _written_tokens(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        if not any(chunk.num_suppressed for chunk in chunks):
            return None
        kept = [np.arange(chunk.num_tokens) >= chunk.num_suppressed for chunk in chunks]
        return self._tensor(np.flatnonzero(np.concatenate(kept)))

    def _written_slots(self, chunk: Chunk) -> npt.NDArray[np.int64]:
        positions = np.arange(chunk.first_position + chunk.num_suppressed, chunk.end_position)
        blocks = chunk.block_table[positions // self.block_size].astype(np.int64)
        slots: npt.NDArray[np.int64] = blocks * self.block_size + positions % self.block_size
        return slots

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _joined(arrays: Sequence[npt.NDArray[np.signedinteger]]) -> npt.NDArray[np.int64]:
    """One int64 array of its own, also of none."""
    return np.concatenate([np.zeros(0, np.int64), *arrays]).astype(np.int64, copy=False)


def _starts(lengths: Int32Array) -> npt.NDArray[np.int64]:
    """[n + 1] where each run starts; the last is where all end."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def _check_agreement(step: StepDescriptor, limits: StepLimits) -> None:
    if step.placement_epoch != limits.placement_epoch:
        raise StepRefusedError(
            f"step {step.step_id} is for placement epoch {step.placement_epoch}, "
            f"this rank holds epoch {limits.placement_epoch}"
        )
    if step.dispatch != limits.dispatch:
        raise StepRefusedError(
            f"step {step.step_id} asks for {step.dispatch} dispatch, "
            f"this cell was started with {limits.dispatch}"
        )


def _check_columns(step: StepDescriptor) -> None:
    per_chunk = {
        "seq_ids": step.seq_ids,
        "ranks": step.ranks,
        "first_positions": step.first_positions,
        "num_tokens": step.num_tokens,
        "route_ids": step.route_ids,
        "samples": step.samples,
        "num_suppressed": step.num_suppressed,
        "score_lens": step.score_lens,
        "block_table_lens": step.block_table_lens,
        "fragment_lens": step.fragment_lens,
    }
    flat = {
        "input_ids": step.input_ids,
        "block_tables": step.block_tables,
        "fragment_ids": step.fragment_ids,
        "evicted_fragment_ids": step.evicted_fragment_ids,
        "score_target_ids": step.score_target_ids,
    }
    for name, column in (per_chunk | flat).items():
        if column.dtype != np.int32 or column.ndim != 1:
            raise StepRefusedError(
                f"step {step.step_id}: {name} is {column.dtype} {column.shape}, expected int32 [n]"
            )
    for name, column in per_chunk.items():
        if len(column) != len(step.seq_ids):
            raise StepRefusedError(
                f"step {step.step_id}: {name} has {len(column)} entries for {len(step.seq_ids)} chunks"
            )


def _check_sums(step: StepDescriptor) -> None:
    for name, lengths, column in (
        ("input_ids", step.num_tokens, step.input_ids),
        ("block_tables", step.block_table_lens, step.block_tables),
        ("fragment_ids", step.fragment_lens, step.fragment_ids),
        ("score_target_ids", step.score_lens, step.score_target_ids),
    ):
        total = int(lengths.sum(dtype=np.int64))
        if total != len(column):
            raise StepRefusedError(
                f"step {step.step_id}: {name} has {len(column)} entries, its chunks say {total}"
            )


def _check_order(step: StepDescriptor) -> None:
    if (np.diff(step.ranks) < 0).any():
        raise StepRefusedError(
            f"step {step.step_id}: ranks are {step.ranks.tolist()}, chunks stand in order of rank"
        )


def _check_not_longer(step: StepDescriptor, name: str, counts: Int32Array) -> None:
    too_many = counts > step.num_tokens
    if too_many.any():
        chunk = int(np.argmax(too_many))
        raise StepRefusedError(
            f"step {step.step_id}: seq {step.seq_ids[chunk]} has {name} {counts[chunk]}, "
            f"its chunk has {step.num_tokens[chunk]} tokens"
        )


def _check_fragments(step: StepDescriptor) -> None:
    """A chunk has one kind, and what is named is not evicted."""
    both = (step.fragment_lens > 0) & (step.route_ids >= 0)
    if both.any():
        chunk = int(np.argmax(both))
        raise StepRefusedError(
            f"step {step.step_id}: seq {step.seq_ids[chunk]} names {step.fragment_lens[chunk]} plan "
            f"fragments and route {step.route_ids[chunk]}, a chunk has one of them"
        )
    evicted = np.intersect1d(step.fragment_ids, step.evicted_fragment_ids)
    if len(evicted):
        raise StepRefusedError(
            f"step {step.step_id} names and evicts plan fragments {evicted.tolist()}"
        )


def _check_range(
    step: StepDescriptor, name: str, column: npt.NDArray[np.signedinteger], low: int, end: int
) -> None:
    if not len(column):
        return
    smallest, largest = int(column.min()), int(column.max())
    if smallest < low or largest >= end:
        raise StepRefusedError(
            f"step {step.step_id}: {name} holds {smallest if smallest < low else largest}, "
            f"allowed are {low} to {end - 1}"
        )
