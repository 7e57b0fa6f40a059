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
    layout = ExpertLayout.of(
        tokens.expert_ids, tokens.expert_weights, weights.down.shape[0], numerics.min_group_rows
    )
    return apply_experts(tokens.x, layout, weights, numerics)


def apply_experts(
    x: Tensor, layout: "ExpertLayout", weights: ExpertWeights, numerics: Numerics
) -> Tensor:
    """The same for a layout that is known already. x: [R, H]. Returns [R, H]."""
    if layout.rows.shape[0] == 0:
        return torch.zeros_like(x)
    grouped = x.index_select(0, layout.source_rows)
    gate_up = numerics.grouped_linear(grouped, weights.gate_up, layout.group_ends)
    gate, up = gate_up.chunk(2, dim=-1)
    down = numerics.grouped_linear(numerics.silu(gate) * up, weights.down, layout.group_ends)
    return _weighted_sum(down, x, layout)


@dataclass(frozen=True)
class ExpertLayout:
    """Where each pair stands among the rows of the grouped products.

    source_rows:   [N] int64, the received row at each place (any row where a group is padded)
    group_ends:    [E] int32, cumulative
    places, rows, ordinals:
                   [P] int64 of each pair: its place, its row, its number among the row's pairs in ascending local
                   expert order
    pair_weights:  [P] float32, as applied
    num_ordinals:  K: a row has at most so many pairs
    """

    source_rows: Tensor
    group_ends: Tensor
    places: Tensor
    rows: Tensor
    ordinals: Tensor
    pair_weights: Tensor
    num_ordinals: int

    @staticmethod
    def of(
        expert_ids: Tensor, expert_weights: Tensor, num_experts: int, min_group_rows: int
    ) -> "ExpertLayout":
        """expert_ids: [R, K] int64, −1 where the choice is not ours; expert_weights: [R, K] float32.

        `nonzero` waits for the device: the one host synchronisation of the expert layer.
        """
        ordered, columns = expert_ids.masked_fill(expert_ids < 0, num_experts).sort(dim=-1)
        rows, ordinals = (ordered < num_experts).nonzero(as_tuple=True)
        experts, order = ordered[rows, ordinals].sort(stable=True)
        rows, ordinals = rows[order], ordinals[order]
        pair_weights = expert_weights[rows, columns[rows, ordinals]]
        local = torch.arange(num_experts, device=experts.device)
        ends = torch.searchsorted(experts, local, right=True)
        num_ordinals = expert_ids.shape[1]
        if min_group_rows == 1:
            places = torch.arange(rows.shape[0], device=rows.device)
            return ExpertLayout(
                rows, ends.to(torch.int32), places, rows, ordinals, pair_weights, num_ordinals
            )
        counts = ends.diff(prepend=ends.new_zeros(1))
        padded = torch.where(counts > 0, counts.clamp(min=min_group_rows), 0)
        padded_ends = padded.cumsum(0)
        shift = (padded_ends - padded) - (ends - counts)
        places = torch.arange(rows.shape[0], device=rows.device) + shift[experts]
        source_rows = rows.new_zeros(int(padded_ends[-1])).index_copy_(0, places, rows)
        return ExpertLayout(
            source_rows,
            padded_ends.to(torch.int32),
            places,
            rows,
            ordinals,
            pair_weights,
            num_ordinals,
        )


def _weighted_sum(down: Tensor, x: Tensor, layout: ExpertLayout) -> Tensor:
    """down: [N, H]. Adds in float32, one expert after another: a scatter-add would leave the order open."""
    weighted = down.index_select(0, layout.places) * layout.pair_weights[:, None]
    parts = weighted.new_zeros(layout.num_ordinals, x.shape[0], down.shape[1])
    parts[layout.ordinals, layout.rows] = weighted
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)
