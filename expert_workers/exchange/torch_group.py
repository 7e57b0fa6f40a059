"""Exchange over a torch.distributed group: gloo for CPU tensors, NCCL for CUDA tensors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from expert_workers.exchange.base import ExchangeError, RowSplits

_Message = tuple[int, Tensor]
"""Peer and rows."""
_TAG = 0


class TorchGroupExchange:
    """One all-to-all per call, or one message per pair.

    The group's own timeout bounds every wait; the group belongs to the caller.
    """

    def __init__(self, group: dist.ProcessGroup, *, pairs_in_one_batch: bool | None = None) -> None:
        """pairs_in_one_batch: by default with NCCL, which takes messages both ways at once only so. With gloo each one
        by itself is faster."""
        if pairs_in_one_batch is None:
            pairs_in_one_batch = dist.get_backend(group) == dist.Backend.NCCL
        self._group = group
        self._pairs_in_one_batch = pairs_in_one_batch
        self._rank = group.rank()
        self._peers = [peer for peer in range(group.size()) if peer != self._rank]

    def exchange_counts(self, send_counts: Tensor) -> RowSplits:
        recv_counts = torch.empty_like(send_counts)
        with self._failing_as_exchange_error("counts"):
            dist.all_to_all_single(recv_counts, send_counts, group=self._group)
            # The one place of a dispatch where the host waits for the device.
            send, recv = torch.stack((send_counts, recv_counts)).tolist()
        return RowSplits(tuple(send), tuple(recv))

    def exchange_rows(self, rows: Tensor, splits: RowSplits) -> Tensor:
        received = rows.new_empty(splits.num_received, *rows.shape[1:])
        with self._failing_as_exchange_error("rows"):
            dist.all_to_all_single(
                received,
                rows.contiguous(),
                output_split_sizes=list(splits.recv),
                input_split_sizes=list(splits.send),
                group=self._group,
            )
        return received

    def exchange_pairs(self, rows: Tensor, splits: RowSplits) -> Tensor:
        received = rows.new_empty(splits.num_received, *rows.shape[1:])
        sent = torch.split(rows.contiguous(), list(splits.send))
        slots = torch.split(received, list(splits.recv))
        slots[self._rank].copy_(sent[self._rank])
        receives = [(peer, slots[peer]) for peer in self._peers if splits.recv[peer]]
        sends = [(peer, sent[peer]) for peer in self._peers if splits.send[peer]]
        with self._failing_as_exchange_error("rows between pairs"):
            # Every Work is kept until it is waited for, and its tensor with it: else gloo delivers nothing.
            for work in self._start(receives, sends):
                work.wait()
        return received

    def _start(self, receives: list[_Message], sends: list[_Message]) -> list[dist.Work]:
        if self._pairs_in_one_batch:
            return self._start_batch(receives, sends)
        return self._start_one_by_one(receives, sends)

    def _start_one_by_one(self, receives: list[_Message], sends: list[_Message]) -> list[dist.Work]:
        """Receives first: with gloo every message is a rendezvous. The group is called without the checks of
        `torch.distributed`'s own functions, which take a tenth of a small exchange."""
        works = [self._group.recv([slot], peer, _TAG) for peer, slot in receives]
        return works + [self._group.send([rows], peer, _TAG) for peer, rows in sends]

    def _start_batch(self, receives: list[_Message], sends: list[_Message]) -> list[dist.Work]:
        operations = [dist.P2POp(dist.irecv, slot, peer, self._group) for peer, slot in receives]
        operations += [dist.P2POp(dist.isend, rows, peer, self._group) for peer, rows in sends]
        return dist.batch_isend_irecv(operations) if operations else []

    @contextmanager
    def _failing_as_exchange_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # torch.distributed's own errors are RuntimeErrors, gloo's are plain ones
            raise ExchangeError(
                f"rank {self._rank}: exchange of {what} failed: {_first_line(error)}"
            ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
