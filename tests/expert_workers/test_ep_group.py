"""Meeting of ranks: interfaces, missing ranks, stores that are not there."""

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest
import torch

from cluster.errors import CellError, ConfigError
from cluster.types import ExchangeKind
from expert_workers.ep_group import (
    EpGroup,
    connect_store,
    host_store,
    interface_of,
    interface_settings,
    join_group,
    leave_group,
)
from expert_workers.exchange.base import RowSplits
from expert_workers.exchange.torch_group import TorchGroupExchange
from tests.helpers.ranks import LOOPBACK, RankContext, RanksFailedError, run_ranks


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of(LOOPBACK) == "lo"


def test_an_address_of_another_host_is_refused_with_this_hosts_interfaces() -> None:
    with pytest.raises(ConfigError, match=r"owns 192\.0\.2\.1; it has .*lo"):
        interface_of("192.0.2.1")


def test_nccl_is_given_this_interface_and_none_that_begins_like_it() -> None:
    assert interface_settings("nccl", "eth1") == {"NCCL_SOCKET_IFNAME": "=eth1"}
    assert interface_settings("gloo", "eth1") == {"GLOO_SOCKET_IFNAME": "eth1"}


@pytest.mark.parametrize(
    ("exchange", "name", "value"),
    [("gloo", "GLOO_SOCKET_IFNAME", "lo"), ("nccl", "NCCL_SOCKET_IFNAME", "=lo")],
)
def test_the_interface_of_this_hosts_address_is_set_before_the_group_begins(
    exchange: ExchangeKind, name: str, value: str
) -> None:
    def join(context: RankContext) -> str | None:
        os.environ[name] = "set_by_somebody_else"
        options = replace(context.group_options, exchange=exchange)
        with contextlib.suppress(CellError):  # of NCCL where there is no GPU
            join_group(options, context.store())
        return os.environ.get(name)

    assert run_ranks(1, join) == [value]


def test_ranks_meet_at_a_hosted_store_and_exchange_rows() -> None:
    store = host_store(LOOPBACK, 0, 20.0)

    def send_my_rank(context: RankContext) -> list[int]:
        options = replace(context.group_options, store_port=store.port)
        exchange = TorchGroupExchange(join_group(options, connect_store(options)).process_group)
        splits = exchange.exchange_counts(torch.tensor([context.rank, 2 - context.rank]))
        rows = torch.full((splits.num_sent, 1), context.rank)
        return exchange.exchange_rows(rows, splits).flatten().tolist()

    assert run_ranks(2, send_my_rank) == [[1], [0, 0, 1]]


def test_a_hosted_store_listens_on_its_address_alone() -> None:
    store = host_store("127.0.0.2", 0, 5.0)
    listening = [
        connection.laddr
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == store.port
    ]
    assert listening == [("127.0.0.2", store.port)]


def test_a_rank_of_another_cell_does_not_count_as_one_of_this() -> None:
    store = host_store(LOOPBACK, 0, 20.0)

    def join_as(context: RankContext) -> str:
        options = replace(
            context.group_options,
            store_port=store.port,
            join_timeout_seconds=2.0,
            group_name=f"cell {context.rank}",
        )
        with pytest.raises(CellError) as caught:
            join_group(options, connect_store(options))
        return str(caught.value)

    messages = run_ranks(2, join_as)
    assert [message.rpartition(": ")[2] for message in messages] == [
        "rank 1 did not arrive",
        "rank 0 did not arrive",
    ]


def test_a_rank_that_does_not_come_is_named_with_host_address_and_port() -> None:
    def join_alone(context: RankContext) -> str:
        options = replace(
            context.group_options, ep_size=3, store_port=4711, join_timeout_seconds=0.3
        )
        with pytest.raises(CellError) as caught:
            join_group(options, context.store())
        return str(caught.value)

    (message,) = run_ranks(1, join_alone)
    assert message == (
        "rank 0 on host 127.0.0.1 could not join the EP group of 3 at 127.0.0.1:4711 within 0.3 s: "
        "rank 1, 2 did not arrive"
    )


def test_a_store_that_nobody_hosts_is_at_once_an_error_that_names_it() -> None:
    def connect(context: RankContext) -> str:
        options = replace(context.group_options, store_port=1, join_timeout_seconds=300.0)
        with pytest.raises(CellError) as caught:
            connect_store(options)
        return str(caught.value)

    (message,) = run_ranks(1, connect)
    assert message.startswith("rank 0 on host 127.0.0.1 could not join")
    tried = re.search(r"127\.0\.0\.1:1 within ([\d.]+) s", message)
    assert tried is not None
    assert float(tried[1]) < 30


def test_a_store_whose_host_dies_before_it_has_answered_does_not_hold_a_rank() -> None:
    def connect(context: RankContext) -> str:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        options = replace(context.group_options, store_port=port, join_timeout_seconds=300.0)

        def die() -> None:
            connection, _ = listener.accept()
            connection.recv(1)
            listener.close()
            connection.close()

        with ThreadPoolExecutor(1) as pool:
            death = pool.submit(die)
            with pytest.raises(CellError) as caught:
                connect_store(options)
            death.result(5.0)
        return str(caught.value)

    (message,) = run_ranks(1, connect)
    assert "could not join the EP group" in message


def test_a_taken_port_is_an_error_that_names_it() -> None:
    store = host_store(LOOPBACK, 0, 5.0)
    with pytest.raises(CellError, match=f"no rendezvous store at {LOOPBACK}:{store.port}"):
        host_store(LOOPBACK, store.port, 5.0)


def test_a_closed_group_can_be_joined_again() -> None:
    def join_twice(context: RankContext) -> int:
        for generation in ("first", "second"):
            group: EpGroup = join_group(context.group_options, context.store(generation))
            splits = TorchGroupExchange(group.process_group).exchange_counts(torch.tensor([1, 1]))
            assert splits == RowSplits(send=(1, 1), recv=(1, 1))
            group.leave()
        leave_group()
        return context.rank

    assert run_ranks(2, join_twice) == [0, 1]


def test_ranks_whose_meeting_broke_off_half_way_meet_new_ones_at_the_next() -> None:
    next_store = host_store(LOOPBACK, 0, 20.0)
    port = multiprocessing.get_context("fork").SimpleQueue()

    def meet(context: RankContext) -> list[int]:
        if context.rank == 0:
            store = host_store(LOOPBACK, 0, 20.0)
            peer = connect_store(replace(context.group_options, store_port=store.port))
            peer.set("arrived/0", LOOPBACK)
            port.put(store.port)
            peer.wait(["arrived/1"], timedelta(seconds=20))
            peer.get("ep_group/0//cpu//0/1")  # it says where it listens, and looks for rank 0
            del store, peer
        else:
            first = replace(context.group_options, store_port=port.get())
            with pytest.raises(CellError, match=r"rank 1 .* could not join"):
                join_group(first, connect_store(first))
        second = replace(context.group_options, store_port=next_store.port)
        group = join_group(second, connect_store(second))
        splits = TorchGroupExchange(group.process_group).exchange_counts(torch.tensor([1, 2]))
        return list(splits.recv)

    assert run_ranks(2, meet) == [[1, 1], [2, 2]]


def test_a_rank_that_dies_while_others_connect_to_it_holds_them_for_a_bounded_time() -> None:
    """Before the third says where it listens, the first waits for that, with the second already there."""
    store = host_store(LOOPBACK, 0, 20.0)
    third = multiprocessing.get_context("fork").SimpleQueue()

    def meet(context: RankContext) -> float:
        options = replace(context.group_options, store_port=store.port, meet_timeout_seconds=1.0)
        peer = connect_store(options)
        if context.rank == 1:
            peer.set("arrived/1", LOOPBACK)
            peer.get("ep_group/0//cpu//0/2")
            os.kill(third.get(), signal.SIGKILL)
        if context.rank == 2:
            third.put(os.getpid())
        began = time.monotonic()
        with contextlib.suppress(CellError):
            join_group(options, peer)
        return time.monotonic() - began

    waited = run_ranks(3, meet, may_die=frozenset({2}), exchange_timeout_seconds=120.0)
    assert max(waited[:2]) < 30.0


def test_an_exchange_may_take_longer_than_the_meeting_before_it() -> None:
    def exchange(context: RankContext) -> list[int]:
        options = replace(context.group_options, meet_timeout_seconds=3.0)
        ranks = TorchGroupExchange(join_group(options, context.store()).process_group)
        if context.rank == 1:
            time.sleep(4.0)  # of a slow rank
        return list(ranks.exchange_counts(torch.tensor([1, 2])).recv)

    assert run_ranks(2, exchange) == [[1, 1], [2, 2]]


def test_the_helper_names_the_rank_that_raised() -> None:
    def fail_on_one(context: RankContext) -> None:
        if context.rank == 1:
            raise ValueError("broken on purpose")

    with pytest.raises(RanksFailedError, match=r"rank 1 raised:[\s\S]*broken on purpose"):
        run_ranks(2, fail_on_one)


def test_the_helper_ends_ranks_that_pass_the_deadline() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"rank 0 did not finish within 0\.5 s"):
        run_ranks(1, lambda context: time.sleep(60), deadline_seconds=0.5)
    assert time.monotonic() - started < 10
