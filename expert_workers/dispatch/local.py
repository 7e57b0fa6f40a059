"""Dispatch within one rank: nothing crosses."""

import torch
from torch import Tensor

from cluster.placement import ExpertPlacement
from expert_workers.dispatch.base import DispatchedTokens
from expert_workers.dispatch.layout import expert_lookup


class LocalDispatcher:
    """For an EP group of one rank. Raises ValueError for a placement over more."""

    def __init__(self, placement: ExpertPlacement, device: torch.device) -> None:
        if placement.ep_size != 1:
            raise ValueError(
                f"local dispatch serves one rank, the placement has {placement.ep_size}"
            )
        self._lookup = expert_lookup(placement, device)

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, positions: Tensor
    ) -> DispatchedTokens:
        return DispatchedTokens(
            x=x,
            expert_ids=self._lookup.locations(topk_ids, positions).local_ids,
            expert_weights=topk_weights,
            handle=None,
        )

    def combine(self, y: Tensor, handle: object) -> Tensor:
        return y
