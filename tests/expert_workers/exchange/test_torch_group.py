"""Rows between pairs of gloo ranks: what arrives, how many messages it takes, what ends it."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.profiler import profile

from expert_workers.ep_group import join_group
from expert_workers.exchange.base import Exchange, ExchangeError, RowSplits
from expert_workers.exchange.torch_group import TorchGroupExchange
from tests.helpers.ranks import RankContext, run_ranks

WIDTH = 3
SPARSE = np.array([[2, 0, 3, 0], [0, 0, 0, 0], [1, 0, 4, 0], [0, 5, 0, 0]])
"""[W, W] rows from each source to each destination: rank 1 sends nothing, rank 3 gets nothing."""


def splits_of(counts: np.ndarray, rank: int) -> RowSplits:
    return RowSplits(tuple(counts[rank].tolist()), tuple(counts[:, rank].tolist()))


def make_rows(rank: int, splits: RowSplits, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Row i of rank r is filled with 100 r + i."""
    numbers = 100 * rank + torch.arange(splits.num_sent)
    return numbers[:, None].expand(-1, WIDTH).to(dtype)


def by_all_to_all(exchange: Exchange, rows: torch.Tensor, splits: RowSplits) -> torch.Tensor:
    return exchange.exchange_rows(rows, splits)


def by_pairs(exchange: Exchange, rows: torch.Tensor, splits: RowSplits) -> torch.Tensor:
    return exchange.exchange_pairs(rows, splits)


Way = Callable[[Exchange, torch.Tensor, RowSplits], torch.Tensor]


@pytest.mark.parametrize("way", [by_all_to_all, by_pairs])
def test_rows_arrive_by_source_and_in_the_senders_order_and_go_back_likewise(way: Way) -> None:
    def there_and_back(context: RankContext) -> tuple[list[float], bool]:
        exchange = context.exchange()
        splits = splits_of(SPARSE, context.rank)
        sent = make_rows(context.rank, splits)
        received = way(exchange, sent, splits)
        returned = way(exchange, received, splits.reversed())
        assert torch.equal(received, received[:, :1].expand(-1, WIDTH))
        return received[:, 0].tolist(), torch.equal(returned, sent)

    answers = run_ranks(4, there_and_back)
    assert [rows for rows, _ in answers] == [
        [0, 1, 200],
        [300, 301, 302, 303, 304],
        [2, 3, 4, 201, 202, 203, 204],
        [],
    ]
    assert all(same for _, same in answers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_pairs_move_any_dtype_also_of_rows_that_are_not_contiguous(dtype: torch.dtype) -> None:
    counts = np.array([[1, 2], [2, 0]])

    def first_column(context: RankContext) -> tuple[list[float], bool]:
        splits = splits_of(counts, context.rank)
        rows = make_rows(context.rank, splits, dtype)
        received = context.exchange().exchange_pairs(rows, splits)
        return received[:, 0].tolist(), received.dtype == dtype

    assert run_ranks(2, first_column) == [([0, 100, 101], True), ([1, 2], True)]


@pytest.mark.parametrize("in_one_batch", [False, True])
def test_a_pair_with_rows_takes_one_message_and_nothing_else_crosses(in_one_batch: bool) -> None:
    def sent_and_received(context: RankContext) -> dict[str, int]:
        exchange = make_exchange(context, in_one_batch)
        splits = splits_of(SPARSE, context.rank)
        with profile() as profiler:
            exchange.exchange_pairs(make_rows(context.rank, splits), splits)
        return gloo_calls(profiler)

    assert run_ranks(4, sent_and_received) == [
        {"gloo:send": 1, "gloo:recv": 1},
        {"gloo:recv": 1},
        {"gloo:send": 1, "gloo:recv": 1},
        {"gloo:send": 1},
    ]


def make_exchange(context: RankContext, in_one_batch: bool) -> TorchGroupExchange:
    group = join_group(context.group_options, context.store())
    return TorchGroupExchange(group.process_group, pairs_in_one_batch=in_one_batch)


def gloo_calls(profiler: Any) -> dict[str, int]:
    events = profiler.key_averages()
    return {event.key: event.count for event in events if event.key.startswith("gloo:")}


def test_ranks_without_rows_either_way_need_not_call() -> None:
    """Rank 2 stays away, and the others' pairs and the next collective of all still work."""

    def exchange_twice(context: RankContext) -> list[float]:
        exchange = context.exchange()
        counts = np.array([[0, 2, 0], [1, 0, 0], [0, 0, 0]])
        splits = splits_of(counts, context.rank)
        received = torch.empty(0, WIDTH)
        if context.rank < 2:
            received = exchange.exchange_pairs(make_rows(context.rank, splits), splits)
        exchange.exchange_counts(torch.zeros(3, dtype=torch.int64))
        return received[:, 0].tolist()

    assert run_ranks(3, exchange_twice) == [[100], [0, 1], []]


@pytest.mark.parametrize("in_one_batch", [False, True])
def test_many_exchanges_in_a_row_stay_in_order(in_one_batch: bool) -> None:
    rounds = np.random.default_rng(3).integers(0, 3, (40, 3, 3))

    def run_rounds(context: RankContext) -> list[list[float]]:
        exchange = make_exchange(context, in_one_batch)
        received = []
        for number, counts in enumerate(rounds):
            splits = splits_of(counts, context.rank)
            rows = make_rows(context.rank, splits) + 1000 * number
            received.append(exchange.exchange_pairs(rows, splits)[:, 0].tolist())
        return received

    for rank, received in enumerate(run_ranks(3, run_rounds)):
        for number, counts in enumerate(rounds):
            starts = counts.cumsum(axis=1) - counts
            assert received[number] == [
                1000 * number + 100 * source + starts[source, rank] + i
                for source in range(3)
                for i in range(counts[source, rank])
            ]


def test_a_peer_killed_before_its_rows_came_is_an_exchange_error_in_bounded_time() -> None:
    swap = np.array([[0, 1], [1, 0]])

    def seconds_until_error(context: RankContext) -> float:
        exchange, splits = context.exchange(), splits_of(swap, context.rank)
        exchange.exchange_pairs(torch.zeros(1, WIDTH), splits)
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(ExchangeError, match="rank 0: exchange of rows between pairs failed"):
            exchange.exchange_pairs(torch.zeros(1, WIDTH), splits)
        return time.monotonic() - started

    waited, died = run_ranks(
        2, seconds_until_error, exchange_timeout_seconds=5.0, may_die=frozenset({1})
    )
    assert died is None
    assert waited < 10.0


def test_a_peer_that_lives_but_does_not_send_is_an_exchange_error_after_the_timeout() -> None:
    def seconds_until_error(context: RankContext) -> float:
        exchange, store = context.exchange(), context.store("given-up")
        if context.rank == 1:
            store.wait(["rank 0 gave up"])
            return 0.0
        started = time.monotonic()
        with pytest.raises(ExchangeError, match=r"rows between pairs failed: .*[Tt]imed out"):
            exchange.exchange_pairs(torch.zeros(0, WIDTH), RowSplits((0, 0), (0, 1)))
        store.set("rank 0 gave up", "")
        return time.monotonic() - started

    waited, _ = run_ranks(2, seconds_until_error, exchange_timeout_seconds=0.5)
    assert 0.4 < waited < 5.0
