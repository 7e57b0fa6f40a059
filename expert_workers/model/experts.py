"""This rank's experts on the rows it received: sorted by expert, one grouped product per projection.

Letters: R rows received, K experts per token, E experts of this rank, H hidden, P pairs of row and local expert,
N rows of the grouped products (P, or more where groups are padded).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from expert_workers.dispatch.base import DispatchedTokens
from expert_workers.model.numerics import Numerics
from expert_workers.model.weights import ExpertWeights


def run_experts(tokens: DispatchedTokens, weights: ExpertWeights, numerics: Numerics) -> Tensor:
    """Per row the weighted sum over this rank's experts, in ascending local expert order. Returns [R, H]."""
    layout = _ExpertLayout.of(tokens.expert_ids, weights.down.shape[0], numerics.min_group_rows)
    if layout is None:
        return torch.zeros_like(tokens.x)
    grouped = tokens.x.index_select(0, layout.source_rows)
    gate_up = numerics.grouped_linear(grouped, weights.gate_up, layout.group_ends)
    gate, up = gate_up.chunk(2, dim=-1)
    down = numerics.grouped_linear(numerics.silu(gate) * up, weights.down, layout.group_ends)
    return _weighted_sum(down, tokens, layout)


@dataclass(frozen=True)
class _ExpertLayout:
    """Where each pair stands among the rows of the grouped products.

    source_rows: [N] int64, the received row at each place (any row where a group is padded)
    group_ends:  [E] int32, cumulative
    places, rows, ordinals, columns:
                 [P] int64 of each pair: its place, its row, its number among the row's pairs in ascending local
                 expert order, and the column of `expert_ids` that it came from
    """

    source_rows: Tensor
    group_ends: Tensor
    places: Tensor
    rows: Tensor
    ordinals: Tensor
    columns: Tensor

    @staticmethod
    def of(expert_ids: Tensor, num_experts: int, min_group_rows: int) -> "_ExpertLayout | None":
        """expert_ids: [R, K] int64, −1 where the choice is not ours. None when no choice is.

        `nonzero` waits for the device: the one host synchronisation of the expert layer.
        """
        ordered, columns = expert_ids.masked_fill(expert_ids < 0, num_experts).sort(dim=-1)
        rows, ordinals = (ordered < num_experts).nonzero(as_tuple=True)
        if rows.shape[0] == 0:
            return None
        experts, order = ordered[rows, ordinals].sort(stable=True)
        rows, ordinals = rows[order], ordinals[order]
        columns = columns[rows, ordinals]
        local = torch.arange(num_experts, device=experts.device)
        ends = torch.searchsorted(experts, local, right=True)
        if min_group_rows == 1:
            places = torch.arange(rows.shape[0], device=rows.device)
            return _ExpertLayout(rows, ends.to(torch.int32), places, rows, ordinals, columns)
        counts = ends.diff(prepend=ends.new_zeros(1))
        padded = torch.where(counts > 0, counts.clamp(min=min_group_rows), 0)
        padded_ends = padded.cumsum(0)
        shift = (padded_ends - padded) - (ends - counts)
        places = torch.arange(rows.shape[0], device=rows.device) + shift[experts]
        source_rows = rows.new_zeros(int(padded_ends[-1])).index_copy_(0, places, rows)
        return _ExpertLayout(
            source_rows, padded_ends.to(torch.int32), places, rows, ordinals, columns
        )


def _weighted_sum(down: Tensor, tokens: DispatchedTokens, layout: _ExpertLayout) -> Tensor:
    """down: [N, H]. Adds in float32, one expert after another: a scatter-add would leave the order open."""
    applied = tokens.expert_weights[layout.rows, layout.columns]
    weighted = down.index_select(0, layout.places) * applied[:, None]
    num_rows, num_columns = tokens.expert_ids.shape
    parts = weighted.new_zeros(num_columns, num_rows, down.shape[1])
    parts[layout.ordinals, layout.rows] = weighted
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(tokens.x.dtype)
