"""Exchange over a torch.distributed group: gloo for CPU tensors, NCCL for CUDA tensors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from expert_workers.exchange.base import ExchangeError, RowSplits


class TorchGroupExchange:
    """One all-to-all per call. The group's own timeout bounds every wait; the group belongs to the caller."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = group.rank()

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
        peers = [peer for peer in range(self._group.size()) if peer != self._rank]
        # Receives first: with gloo every message is a rendezvous.
        operations = [
            dist.P2POp(dist.irecv, slots[peer], peer, self._group)
            for peer in peers
            if splits.recv[peer]
        ] + [
            dist.P2POp(dist.isend, sent[peer], peer, self._group)
            for peer in peers
            if splits.send[peer]
        ]
        with self._failing_as_exchange_error("rows between pairs"):
            # Every Work is kept until it is waited for, and its tensor with it: else gloo delivers nothing.
            for work in dist.batch_isend_irecv(operations) if operations else []:
                work.wait()
        return received

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
