"""An exchange that also knows what it sent: for tests and measurements."""

from dataclasses import dataclass

from torch import Tensor

from expert_workers.exchange.base import Exchange, RowSplits


@dataclass(frozen=True)
class SentTraffic:
    """What one rank sent to others. Payload bytes, without the transport's own."""

    messages: int = 0
    bytes: int = 0

    def __add__(self, other: "SentTraffic") -> "SentTraffic":
        return SentTraffic(self.messages + other.messages, self.bytes + other.bytes)


class CountingExchange:
    """Passes every call on. Owner of the traffic since the last `take`.

    An all-to-all sends one message to every other rank, one without rows too; pairs send only those with rows.
    """

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange = exchange
        self._rank = rank
        self._sent = SentTraffic()

    def exchange_counts(self, send_counts: Tensor) -> RowSplits:
        splits = self._exchange.exchange_counts(send_counts)
        others = len(splits.send) - 1
        self._sent += SentTraffic(others, others * send_counts.itemsize)
        return splits

    def exchange_rows(self, rows: Tensor, splits: RowSplits) -> Tensor:
        self._sent += SentTraffic(len(splits.send) - 1, self._bytes_to_others(rows, splits))
        return self._exchange.exchange_rows(rows, splits)

    def exchange_pairs(self, rows: Tensor, splits: RowSplits) -> Tensor:
        messages = sum(count > 0 for peer, count in enumerate(splits.send) if peer != self._rank)
        self._sent += SentTraffic(messages, self._bytes_to_others(rows, splits))
        return self._exchange.exchange_pairs(rows, splits)

    def take(self) -> SentTraffic:
        """Traffic since the last call; the next starts from zero."""
        sent, self._sent = self._sent, SentTraffic()
        return sent

    def _bytes_to_others(self, rows: Tensor, splits: RowSplits) -> int:
        row_bytes = rows[:1].numel() * rows.itemsize
        return (splits.num_sent - splits.send[self._rank]) * row_bytes
