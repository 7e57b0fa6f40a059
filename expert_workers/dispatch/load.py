"""Counts the rows that this rank's experts serve, between the model and any dispatcher."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expert_workers.dispatch.base import DispatchedTokens, Dispatcher


class LoadCountingDispatcher:
    """Owner of one step's expert load; `take_load` at its end starts the next."""

    def __init__(self, dispatcher: Dispatcher, num_local_experts: int) -> None:
        self._dispatcher = dispatcher
        self._num_local_experts = num_local_experts
        self._layers: list[Tensor] = []

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, positions: Tensor
    ) -> DispatchedTokens:
        tokens = self._dispatcher.dispatch(x, topk_ids, topk_weights, positions)
        self._layers.append(_rows_per_expert(tokens.expert_ids, self._num_local_experts))
        return tokens

    def combine(self, y: Tensor, handle: object) -> Tensor:
        return self._dispatcher.combine(y, handle)

    def take_load(self) -> npt.NDArray[np.int32]:
        """[MoE layers, local experts] rows since the last call, in the order of the dispatches."""
        if not self._layers:
            return np.zeros((0, self._num_local_experts), np.int32)
        load = torch.stack(self._layers).to(torch.int32)
        self._layers = []
        return load.cpu().numpy()


def _rows_per_expert(expert_ids: Tensor, num_local_experts: int) -> Tensor:
    """expert_ids: [R, K], −1 elsewhere. Returns [P] int64; unlike bincount it never waits for the device."""
    places = expert_ids.flatten() + 1
    counts = torch.zeros(num_local_experts + 1, dtype=torch.int64, device=places.device)
    return counts.scatter_add_(0, places, torch.ones_like(places))[1:]
