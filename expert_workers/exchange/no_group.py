"""The exchange of a rank that has left its group."""

from typing import NoReturn

from torch import Tensor

from expert_workers.exchange.base import ExchangeError, RowSplits


class NoGroupExchange:
    """Every call raises ExchangeError: until the rank has joined another group it can run no step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def exchange_counts(self, send_counts: Tensor) -> RowSplits:
        self._refuse()

    def exchange_rows(self, rows: Tensor, splits: RowSplits) -> Tensor:
        self._refuse()

    def exchange_pairs(self, rows: Tensor, splits: RowSplits) -> Tensor:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ExchangeError(f"rank {self._rank} has left its group and joined no other yet")
