"""An exchange that also knows what it sent."""

from torch import Tensor

from cluster.worker_messages import SentTraffic
from expert_workers.exchange.base import Exchange, RowSplits


class CountingExchange:
    """Passes every call on. Owner of the traffic since the last `take`.

    An all-to-all sends one message to every other rank, one without rows too; pairs send only those with rows.
    Everything is counted from host integers, so that a device is not waited for.
    """

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange = exchange
        self._rank = rank
        self._messages = 0
        self._bytes = 0

    def replace(self, exchange: Exchange) -> None:
        """From now on calls go there; what was counted so far was for a step that is not."""
        self._exchange = exchange
        self.take()

    def exchange_counts(self, send_counts: Tensor) -> RowSplits:
        splits = self._exchange.exchange_counts(send_counts)
        others = len(splits.send) - 1
        self._add(others, others * send_counts.itemsize)
        return splits

    def exchange_rows(self, rows: Tensor, splits: RowSplits) -> Tensor:
        self._add(len(splits.send) - 1, self._bytes_to_others(rows, splits))
        return self._exchange.exchange_rows(rows, splits)

    def exchange_pairs(self, rows: Tensor, splits: RowSplits) -> Tensor:
        messages = sum(count > 0 for peer, count in enumerate(splits.send) if peer != self._rank)
        self._add(messages, self._bytes_to_others(rows, splits))
        return self._exchange.exchange_pairs(rows, splits)

    def take(self) -> SentTraffic:
        """Traffic since the last call; the next starts from zero."""
        sent = SentTraffic(self._messages, self._bytes)
        self._messages = self._bytes = 0
        return sent

    def _add(self, num_messages: int, num_bytes: int) -> None:
        self._messages += num_messages
        self._bytes += num_bytes

    def _bytes_to_others(self, rows: Tensor, splits: RowSplits) -> int:
        row_bytes = rows.shape[1:].numel() * rows.itemsize
        return (splits.num_sent - splits.send[self._rank]) * row_bytes
