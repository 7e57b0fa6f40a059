"""Dispatch whose sizes and layout every rank knows before the step: rows only, between the pairs that have some, or
where nearly all have in one all-to-all.

No counts, no metadata, no gate, no sort. What a layer does was joined from plan fragments (`expert_workers/step_plan`).

Letters: T planned tokens of this rank, R rows received, H hidden size, W ranks, L MoE layers, E local experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expert_workers.dispatch.layout import SentRows, sum_over_ranks
from expert_workers.exchange.base import Exchange, RowSplits
from expert_workers.exchange.density import all_to_all_pays
from expert_workers.model.experts import ExpertLayout
from expert_workers.step_plan import LayerPlan


@dataclass(frozen=True)
class PlannedLayer:
    """One MoE layer of a step's plan as tensors. by_all_to_all: how its rows go, the same on every rank."""

    rows: SentRows
    splits: RowSplits
    layout: ExpertLayout
    by_all_to_all: bool


@dataclass(frozen=True)
class LayerFormat:
    """num_ordinals: experts per token; min_group_rows: to how many rows a group of an expert is padded."""

    num_ordinals: int
    min_group_rows: int
    device: torch.device


def planned_layer(plan: LayerPlan, layer_format: LayerFormat) -> PlannedLayer:
    """The tensors of one layer. Pure."""
    device = layer_format.device
    destinations = np.repeat(np.arange(len(plan.send_counts)), plan.send_counts)
    return PlannedLayer(
        rows=SentRows(_tensor(plan.send_tokens, device), _tensor(destinations, device)),
        splits=RowSplits(tuple(plan.send_counts.tolist()), tuple(plan.recv_counts.tolist())),
        layout=_layout(plan, layer_format),
        by_all_to_all=all_to_all_pays(plan.num_rank_pairs, len(plan.send_counts)),
    )


def _layout(plan: LayerPlan, layer_format: LayerFormat) -> ExpertLayout:
    """The layout that `ExpertLayout.of` would find for the same rows, from counts alone."""
    counts = plan.pair_counts
    padded = np.where(counts > 0, np.maximum(counts, layer_format.min_group_rows), 0)
    ends = padded.cumsum()
    shifts = np.repeat((ends - padded) - (counts.cumsum() - counts), counts)
    places = np.arange(len(plan.pair_rows)) + shifts
    source_rows = np.zeros(int(padded.sum()), np.int64)
    source_rows[places] = plan.pair_rows
    device = layer_format.device
    return ExpertLayout(
        source_rows=_tensor(source_rows, device),
        group_ends=_tensor(ends.astype(np.int32), device),
        places=_tensor(places, device),
        rows=_tensor(plan.pair_rows, device),
        ordinals=_tensor(plan.pair_ranks, device),
        pair_weights=_tensor(plan.pair_weights, device),
        num_ordinals=layer_format.num_ordinals,
    )


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


class PlannedStep:
    """One step's planned tokens on this rank. Every rank makes the same calls.

    has_dynamic: some rank's chunk of the same step goes another way, so every rank takes that way's exchanges too.
    """

    def __init__(
        self,
        layers: Sequence[PlannedLayer],
        *,
        num_tokens: int,
        has_dynamic: bool,
        expert_load: npt.NDArray[np.int32],
        exchange: Exchange | None,
    ) -> None:
        """expert_load: [L, E] rows of each local expert; exchange: None where there is one rank only."""
        self.expert_load = expert_load
        self.num_tokens = num_tokens
        self.has_dynamic = has_dynamic
        self._layers = layers
        self._exchange = exchange

    def layout(self, moe_layer: int) -> ExpertLayout:
        return self._layers[moe_layer].layout

    def dispatch(self, moe_layer: int, x: Tensor) -> Tensor:
        """x: [T, H]. Returns the rows received, [R, H]. Raises ExchangeError."""
        layer = self._layers[moe_layer]
        return self._move(layer, x[layer.rows.token_indices], layer.splits)

    def combine(self, moe_layer: int, y: Tensor) -> Tensor:
        """y: [R, H], this rank's weighted sums. Returns [T, H], summed in rank order. Raises ExchangeError."""
        layer = self._layers[moe_layer]
        returned = self._move(layer, y, layer.splits.reversed())
        return sum_over_ranks(returned, layer.rows, layer.splits, self.num_tokens)

    def _move(self, layer: PlannedLayer, rows: Tensor, splits: RowSplits) -> Tensor:
        if self._exchange is None:
            return rows
        if layer.by_all_to_all:
            return self._exchange.exchange_rows(rows, splits)
        return self._exchange.exchange_pairs(rows, splits)
