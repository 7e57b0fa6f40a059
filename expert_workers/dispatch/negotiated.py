"""Dispatch that settles its sizes first: counts, then rows with their metadata, then the results back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.placement import ExpertPlacement
from expert_workers.dispatch.base import DispatchedTokens
from expert_workers.dispatch.layout import (
    RowFormat,
    SentRows,
    expert_lookup,
    local_choices,
    pack_rows,
    sent_rows,
    sum_over_ranks,
    unpack_rows,
    wanted_rows,
)
from expert_workers.exchange.base import Exchange, RowSplits


@dataclass(frozen=True)
class _NegotiatedHandle:
    rows: SentRows
    splits: RowSplits
    num_tokens: int


class NegotiatedDispatcher:
    """Three exchanges per MoE layer; any step can use it. Both methods raise ExchangeError.

    One row per token and destination rank. The destination answers with its experts' weighted sum.
    """

    def __init__(
        self, placement: ExpertPlacement, exchange: Exchange, device: torch.device
    ) -> None:
        self._ep_size = placement.ep_size
        self._exchange = exchange
        self._lookup = expert_lookup(placement, device)

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, positions: Tensor
    ) -> DispatchedTokens:
        locations = self._lookup.locations(topk_ids, positions)
        wanted = wanted_rows(locations.ranks, self._ep_size)
        splits = self._exchange.exchange_counts(wanted.sum(dim=1))
        rows = sent_rows(wanted, splits.num_sent)
        row_format = RowFormat(x.shape[1], topk_ids.shape[1], x.dtype)
        ids, weights = local_choices(locations, topk_weights, rows)
        packed = pack_rows(row_format, x[rows.token_indices], ids, weights)
        received = self._exchange.exchange_rows(packed, splits)
        return DispatchedTokens(
            *unpack_rows(row_format, received),
            handle=_NegotiatedHandle(rows, splits, num_tokens=x.shape[0]),
        )

    def combine(self, y: Tensor, handle: object) -> Tensor:
        assert isinstance(handle, _NegotiatedHandle)
        returned = self._exchange.exchange_rows(y, handle.splits.reversed())
        return sum_over_ranks(returned, handle.rows, handle.splits, handle.num_tokens)
