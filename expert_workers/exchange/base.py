"""The Exchange interface: move rows between the ranks of an EP group. Who gets which rows is the dispatcher's business.

Letters: W ranks of the group, n rows.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cluster.errors import CellError


class ExchangeError(CellError):
    """An exchange did not complete on this rank: a peer died, closed its connection or did not answer in time.

    The rank that raises it is usually not the one that failed. The group cannot be used again.
    """


@dataclass(frozen=True)
class RowSplits:
    """Rows per peer of one exchange, in rank order.

    send: [W] rows that this rank sends to each rank
    recv: [W] rows that this rank gets from each rank
    """

    send: tuple[int, ...]
    recv: tuple[int, ...]

    @property
    def num_sent(self) -> int:
        return sum(self.send)

    @property
    def num_received(self) -> int:
        return sum(self.recv)

    def reversed(self) -> "RowSplits":
        """The splits of the way back."""
        return RowSplits(send=self.recv, recv=self.send)


class Exchange(Protocol):
    """Every rank of the group makes the same calls in the same order, with zero rows where it has none.

    All methods raise ExchangeError.
    """

    def exchange_counts(self, send_counts: Tensor) -> RowSplits:
        """send_counts: [W] int64 on the group's device. Returns host integers: on CUDA this waits for the device."""
        ...

    def exchange_rows(self, rows: Tensor, splits: RowSplits) -> Tensor:
        """rows: [sum of splits.send, width] any dtype, in destination rank order.

        Returns [sum of splits.recv, width] of the same dtype in source rank order; the sender's order within a source.
        """
        ...

    def exchange_pairs(self, rows: Tensor, splits: RowSplits) -> Tensor:
        """As `exchange_rows`, where every rank knows its splits and its peers' agree: one message per pair with rows
        between two ranks, and nothing else. A rank without rows either way need not even call.
        """
        ...
