"""Plan fragments that this rank holds, and the step plan that they make. The engine decides what is kept."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cluster.worker_messages import PlanPart
from expert_workers.dispatch.planned import LayerFormat, PlannedStep, planned_layer
from expert_workers.exchange.base import Exchange
from expert_workers.inputs_from_step import PlannedChunk, StepRefusedError
from expert_workers.step_plan import PlacedReceive, PlacedSend, join_parts


@dataclass(frozen=True)
class PlanShape:
    """What every part must fit: MoE layers, this rank's experts, ranks, experts per token, rows per padded group."""

    rank: int
    ep_size: int
    placement_epoch: int
    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    min_group_rows: int
    device: torch.device


class PlanCache:
    """Owner of this rank's parts, by fragment id."""

    def __init__(self, shape: PlanShape, exchange: Exchange | None) -> None:
        """exchange: None where there is one rank only."""
        self._shape = shape
        self._exchange = exchange
        self._format = LayerFormat(shape.num_experts_per_tok, shape.min_group_rows, shape.device)
        self._parts: dict[int, PlanPart] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, part: PlanPart) -> None:
        """Raises StepRefusedError for a part of another placement or shape than this rank's, at odds with itself, or of
        another fragment than the one that has its id here."""
        _check_part(part, self._shape)
        present = self._parts.get(part.fragment_id)
        if present is not None:
            _check_same(part, "digest", part.digest.hex(), present.digest.hex())
        self._parts[part.fragment_id] = part

    def evict(self, fragment_ids: Iterable[int]) -> None:
        for fragment_id in fragment_ids:
            self._parts.pop(fragment_id, None)

    def clear(self) -> None:
        self._parts.clear()

    def plan_step(
        self, step_id: int, chunks: Sequence[PlannedChunk], *, has_dynamic: bool
    ) -> PlannedStep | None:
        """chunks: the planned ones of all ranks, by source.

        None for a step without any. Raises StepRefusedError, before any exchange, for a fragment that is not here or
        is another source's, and for fragments that do not cover their chunk.
        """
        if not chunks:
            return None
        parts = [part for chunk in chunks for part in self._parts_of(step_id, chunk)]
        sends, num_tokens = [], 0
        for part in parts:
            if part.send is not None:
                sends.append(PlacedSend(part.send, num_tokens))
                num_tokens += part.num_tokens
        layers = join_parts(
            sends,
            [PlacedReceive(part.receive, part.source) for part in parts],
            num_layers=self._shape.num_layers,
            num_experts=self._shape.num_experts,
            ep_size=self._shape.ep_size,
        )
        return PlannedStep(
            [planned_layer(layer, self._format) for layer in layers],
            num_tokens=num_tokens,
            has_dynamic=has_dynamic,
            expert_load=np.stack([layer.pair_counts for layer in layers]).astype(np.int32),
            exchange=self._exchange,
        )

    def _parts_of(self, step_id: int, chunk: PlannedChunk) -> list[PlanPart]:
        """This rank's parts of a chunk's fragments; each rank can tell whether they cover it."""
        parts = [
            self._part(step_id, chunk.source, fragment_id) for fragment_id in chunk.fragment_ids
        ]
        num_tokens = sum(part.num_tokens for part in parts)
        if num_tokens != chunk.num_tokens:
            raise StepRefusedError(
                f"step {step_id}: plan fragments {list(chunk.fragment_ids)} of seq {chunk.seq_id} "
                f"cover {num_tokens} tokens, its chunk has {chunk.num_tokens}"
            )
        return parts

    def _part(self, step_id: int, source: int, fragment_id: int) -> PlanPart:
        part = self._parts.get(fragment_id)
        if part is None:
            raise StepRefusedError(
                f"step {step_id} names plan fragment {fragment_id}, which rank {self._shape.rank} "
                f"does not hold (it holds {len(self._parts)})"
            )
        if part.source != source:
            raise StepRefusedError(
                f"step {step_id} uses plan fragment {fragment_id} on rank {source}, "
                f"it was compiled for rank {part.source}"
            )
        return part


def _check_part(part: PlanPart, shape: PlanShape) -> None:
    """All that a join relies on."""
    receive = part.receive
    by_layer = (shape.num_layers,)
    _check_same(part, "placement epoch", part.placement_epoch, shape.placement_epoch)
    _check_same(part, "a source among the ranks", 0 <= part.source < shape.ep_size, True)
    _check_same(part, "a send part", part.send is not None, part.source == shape.rank)
    _check_array(part, "num_rows", receive.num_rows, by_layer, part.num_tokens + 1)
    counts_shape = (shape.num_layers, shape.num_experts)
    rows_per_expert = receive.num_rows[:, None] + 1
    _check_array(part, "pair_counts", receive.pair_counts, counts_shape, rows_per_expert)
    pairs_per_layer = receive.pair_counts.sum(axis=1)
    num_pairs = (int(pairs_per_layer.sum()),)
    ends = np.repeat(receive.num_rows, pairs_per_layer)
    _check_array(part, "pair_rows", receive.pair_rows, num_pairs, ends)
    _check_array(part, "pair_ranks", receive.pair_ranks, num_pairs, shape.num_experts_per_tok)
    _check_same(part, "shape of pair_weights", receive.pair_weights.shape, num_pairs)
    _check_same(part, "dtype of pair_weights", receive.pair_weights.dtype, np.dtype(np.float32))
    _check_ascending(part, "pair_rows", receive.pair_rows, receive.pair_counts)
    named = _destinations(part, shape)
    if part.send is not None:
        counts, by_rank = part.send.counts, (shape.num_layers, shape.ep_size)
        _check_array(part, "send counts", counts, by_rank, part.num_tokens + 1)
        _check_array(part, "send tokens", part.send.tokens, (int(counts.sum()),), part.num_tokens)
        kept = counts[:, shape.rank].tolist()
        _check_same(part, "rows kept at home", kept, receive.num_rows.tolist())
        _check_same(part, "destinations", named, (counts > 0).tolist())
        _check_ascending(part, "send tokens", part.send.tokens, counts)


def _destinations(part: PlanPart, shape: PlanShape) -> list[list[bool]]:
    """By layer and rank. Checked as far as this rank knows: ranks that disagree on them would wait for each other."""
    packed = part.receive.destinations
    by_layer = (shape.num_layers, -(-shape.ep_size // 8))
    _check_same(part, "dtype of destinations", packed.dtype, np.dtype(np.uint8))
    _check_same(part, "shape of destinations", packed.shape, by_layer)
    named = np.unpackbits(packed, axis=1, count=shape.ep_size).astype(np.bool_)
    arriving = (part.receive.num_rows > 0).tolist()
    _check_same(part, "itself as a destination", named[:, shape.rank].tolist(), arriving)
    by_rank: list[list[bool]] = named.tolist()
    return by_rank


def _check_array(
    part: PlanPart,
    name: str,
    array: npt.NDArray[np.integer],
    shape: tuple[int, ...],
    end: int | npt.NDArray[np.integer],
) -> None:
    """Integers from 0 to below `end`, which may differ from entry to entry."""
    _check_same(part, f"shape of {name}", array.shape, shape)
    _check_same(part, f"integers as {name}", array.dtype.kind in "iu", True)
    outside = (array < 0) | (array >= end)
    _check_same(part, f"{name} out of range", array[outside].tolist()[:1], [])


def _check_ascending(
    part: PlanPart, name: str, array: npt.NDArray[np.integer], counts: npt.NDArray[np.integer]
) -> None:
    """array: runs of `counts` entries, in their order. Within a run nothing comes twice, and all in order."""
    runs = np.repeat(np.arange(counts.size), counts.ravel())
    falls = (np.diff(array.astype(np.int64)) <= 0) & (runs[1:] == runs[:-1])
    _check_same(part, f"{name} that do not ascend", array[1:][falls].tolist()[:1], [])


def _check_same(part: PlanPart, name: str, value: object, expected: object) -> None:
    if value != expected:
        raise StepRefusedError(
            f"plan fragment {part.fragment_id} of rank {part.source} has {name} {value}, "
            f"expected {expected}"
        )
