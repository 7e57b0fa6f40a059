"""What a counting exchange says was sent, over an exchange that sends nothing."""

import torch
from torch import Tensor

from cluster.worker_messages import SentTraffic
from expert_workers.exchange.base import RowSplits
from expert_workers.exchange.counting import CountingExchange

SPLITS = RowSplits(send=(4, 1, 0, 2), recv=(0, 1, 0, 3))


class Echo:
    """Every rank sends what rank 1 gets."""

    def exchange_counts(self, send_counts: Tensor) -> RowSplits:
        return SPLITS

    def exchange_rows(self, rows: Tensor, splits: RowSplits) -> Tensor:
        return rows[: splits.num_received]

    def exchange_pairs(self, rows: Tensor, splits: RowSplits) -> Tensor:
        return rows[: splits.num_received]


def make_rows(splits: RowSplits) -> Tensor:
    return torch.arange(splits.num_sent * 5, dtype=torch.float32).view(-1, 5)


def test_counts_and_rows_are_one_message_to_every_other_rank() -> None:
    exchange = CountingExchange(Echo(), rank=1)
    exchange.exchange_counts(torch.zeros(4, dtype=torch.int64))
    assert exchange.take() == SentTraffic(messages=3, bytes=3 * 8)
    exchange.exchange_rows(make_rows(SPLITS), SPLITS)
    assert exchange.take() == SentTraffic(messages=3, bytes=6 * 20)


def test_pairs_are_one_message_to_every_other_rank_that_gets_rows() -> None:
    exchange = CountingExchange(Echo(), rank=1)
    exchange.exchange_pairs(make_rows(SPLITS), SPLITS)
    assert exchange.take() == SentTraffic(messages=2, bytes=6 * 20)
    exchange.exchange_pairs(make_rows(SPLITS.reversed()), SPLITS.reversed())
    assert exchange.take() == SentTraffic(messages=1, bytes=3 * 20)


def test_no_rows_at_all_are_no_message_between_pairs() -> None:
    nothing = RowSplits((0, 0), (0, 0))
    exchange = CountingExchange(Echo(), rank=0)
    exchange.exchange_pairs(torch.zeros(0, 5), nothing)
    assert exchange.take() == SentTraffic(0, 0)


def test_results_are_passed_on_and_traffic_adds_up_until_it_is_taken() -> None:
    exchange = CountingExchange(Echo(), rank=1)
    rows = make_rows(SPLITS)
    assert exchange.exchange_counts(torch.zeros(4, dtype=torch.int64)) == SPLITS
    assert torch.equal(exchange.exchange_rows(rows, SPLITS), rows[:4])
    assert torch.equal(exchange.exchange_pairs(rows, SPLITS), rows[:4])
    assert exchange.take() == SentTraffic(messages=3 + 3 + 2, bytes=24 + 120 + 120)
    assert exchange.take() == SentTraffic(0, 0)
