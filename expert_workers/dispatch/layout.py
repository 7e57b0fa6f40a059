"""Which rows of a dispatch go where, and how a row travels. Pure functions over tensors, shared by all dispatchers.

A token sends one row to every rank that holds at least one of its experts, however many (idea: DeepEP). Rows are
ordered by destination rank, then by token, so that the receiver sees a fixed order.

Letters: T tokens, W ranks, n rows, H hidden size, K experts per token, E logical experts, C copies of the expert that
has most.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.placement import ExpertPlacement
from expert_workers.exchange.base import RowSplits

_ALIGNMENT = 4
"""Bytes; every field of a packed row starts at a multiple of it."""


@dataclass(frozen=True)
class ExpertLocations:
    """Where each choice of a token is served.

    ranks:     [T, K] int64
    local_ids: [T, K] int64, the expert's local index on that rank
    """

    ranks: Tensor
    local_ids: Tensor


@dataclass(frozen=True)
class ExpertLookup:
    """The placement as tensors.

    copies:         [E, C] int64, physical ids of each logical expert's copies, −1 pads
    replica_counts: [E] int64, how many those are; None where every expert has one
    num_per_rank:   physical experts of a rank
    """

    copies: Tensor
    replica_counts: Tensor | None
    num_per_rank: int

    def physical_ids(self, topk_ids: Tensor, positions: Tensor) -> Tensor:
        """`ExpertPlacement.physical_ids` over tensors. topk_ids: [T, K] int64; positions: [T] int64."""
        if self.replica_counts is None:
            return self.copies[:, 0][topk_ids]
        copies = (positions[:, None] + topk_ids) % self.replica_counts[topk_ids]
        return self.copies[topk_ids, copies]

    def locations(self, topk_ids: Tensor, positions: Tensor) -> ExpertLocations:
        """topk_ids: [T, K] int64 logical ids; positions: [T] int64 of the tokens in their sequences."""
        physical = self.physical_ids(topk_ids, positions)
        return ExpertLocations(physical // self.num_per_rank, physical % self.num_per_rank)


def expert_lookup(placement: ExpertPlacement, device: torch.device) -> ExpertLookup:
    def tensor(array: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).to(device, torch.int64)

    redundant = placement.position_period > 1
    return ExpertLookup(
        copies=tensor(placement.logical_to_physical_map),
        replica_counts=tensor(placement.replica_counts) if redundant else None,
        num_per_rank=placement.num_physical_per_rank,
    )


def wanted_rows(ranks: Tensor, ep_size: int) -> Tensor:
    """ranks: [T, K] int64. Returns [W, T] bool: rank w holds at least one expert of token t."""
    wanted = torch.zeros((ep_size, ranks.shape[0]), dtype=torch.bool, device=ranks.device)
    return wanted.scatter_(0, ranks.T, True)


@dataclass(frozen=True)
class SentRows:
    """The rows that one rank sends.

    token_indices: [n] int64, the token that each row carries
    destinations:  [n] int64, the rank that it goes to; never falls
    """

    token_indices: Tensor
    destinations: Tensor


def sent_rows(wanted: Tensor, num_rows: int) -> SentRows:
    """wanted: [W, T] bool with `num_rows` set. The size is known, so nothing waits for the device."""
    indices = torch.nonzero_static(wanted, size=num_rows)
    return SentRows(token_indices=indices[:, 1], destinations=indices[:, 0])


def local_choices(
    locations: ExpertLocations, topk_weights: Tensor, rows: SentRows
) -> tuple[Tensor, Tensor]:
    """The metadata of each row: what its destination shall compute.

    topk_weights: [T, K] float32
    Returns ids [n, K] int64 local at the destination, −1 where the choice is served elsewhere, and weights [n, K]
    float32, 0 there.
    """
    here = locations.ranks[rows.token_indices] == rows.destinations[:, None]
    ids = torch.where(here, locations.local_ids[rows.token_indices], -1)
    return ids, torch.where(here, topk_weights[rows.token_indices], 0.0)


@dataclass(frozen=True)
class RowFormat:
    """Bytes of one packed row: hidden state | local expert ids, int32 | weights, float32."""

    hidden_size: int
    num_experts_per_tok: int
    dtype: torch.dtype

    @property
    def ids_start(self) -> int:
        return -(-self.hidden_size * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    @property
    def weights_start(self) -> int:
        return self.ids_start + self.num_experts_per_tok * torch.int32.itemsize

    @property
    def num_bytes(self) -> int:
        return self.weights_start + self.num_experts_per_tok * torch.float32.itemsize

    def fields(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """buffer: [n, num_bytes] uint8. Views [n, H] of dtype, [n, K] int32, [n, K] float32."""
        hidden_bytes = self.hidden_size * self.dtype.itemsize
        return (
            buffer[:, :hidden_bytes].view(self.dtype),
            buffer[:, self.ids_start : self.weights_start].view(torch.int32),
            buffer[:, self.weights_start :].view(torch.float32),
        )


def pack_rows(row_format: RowFormat, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """x: [n, H]; expert_ids: [n, K] integers; weights: [n, K] float32. Returns [n, num_bytes] uint8."""
    buffer = torch.zeros((x.shape[0], row_format.num_bytes), dtype=torch.uint8, device=x.device)
    hidden_field, ids_field, weights_field = row_format.fields(buffer)
    hidden_field.copy_(x)
    ids_field.copy_(expert_ids)
    weights_field.copy_(weights)
    return buffer


def unpack_rows(row_format: RowFormat, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reverse of `pack_rows`: x [n, H], expert_ids [n, K] int64, weights [n, K] float32, each contiguous.

    Contiguous because the rounding of a matrix product may depend on how its rows lie in memory.
    """
    hidden_field, ids_field, weights_field = row_format.fields(buffer)
    return hidden_field.contiguous(), ids_field.to(torch.int64), weights_field.contiguous()


def sum_over_ranks(returned: Tensor, rows: SentRows, splits: RowSplits, num_tokens: int) -> Tensor:
    """returned: [n, H], the answer to each sent row. Returns [T, H] of the same dtype.

    One addition per rank, in rank order, in float32: a token's sum is the same whatever the other tokens are.
    """
    total = torch.zeros(
        (num_tokens, returned.shape[1]), dtype=torch.float32, device=returned.device
    )
    start = 0
    for count in splits.send:
        # No token twice within one destination, so the additions of one call never meet.
        total.index_add_(
            0, rows.token_indices[start : start + count], returned[start : start + count].float()
        )
        start += count
    return total.to(returned.dtype)
