"""Cells that start on one host at once, and ports that somebody takes in between. Real sockets and gloo; no Ray."""

import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from prometheus_client import CollectorRegistry

from cluster.errors import CellError
from cluster.metrics import Metrics
from expert_workers.ep_group import connect_store, host_store, join_group
from expert_workers.exchange.torch_group import TorchGroupExchange
from router_service.engine_life import EngineLife
from router_service.engine_sockets import EngineAddress, EngineSockets
from tests.helpers.channel_keys import KEYS
from tests.helpers.ranks import LOOPBACK, RankContext, run_ranks

NUM_CELLS, EP_SIZE = 3, 2
START_SECONDS = 30.0
FIRST = EngineLife()


@contextmanager
def engine_sockets(life: EngineLife) -> Iterator[tuple[int, int, int]]:
    """Their ports."""
    metrics = Metrics(CollectorRegistry())
    address = EngineAddress(LOOPBACK, KEYS.engine, life)
    sockets = EngineSockets(address, max_frame_bytes=2**20, refusals=metrics.channel_refusals)
    try:
        clients, workers, routes = (
            int(endpoint.rpartition(":")[2])
            for endpoint in (
                sockets.client_endpoint,
                sockets.worker_endpoint,
                sockets.route_endpoint,
            )
        )
        yield clients, workers, routes
    finally:
        sockets.close_after_sending(0.0)


def test_three_cells_that_start_at_once_on_one_host_meet_nobody_elses_ranks_or_ports() -> None:
    forking = multiprocessing.get_context("fork")
    all_ranks, all_engines = forking.Barrier(NUM_CELLS * EP_SIZE), forking.Barrier(NUM_CELLS)
    rendezvous = [forking.SimpleQueue() for _ in range(NUM_CELLS)]

    def join(context: RankContext, cell: int, rank: int, port: int) -> list[int]:
        """The cells of whoever this rank meets."""
        options = replace(context.group_options, rank=rank, ep_size=EP_SIZE, store_port=port)
        exchange = TorchGroupExchange(join_group(options, connect_store(options)).process_group)
        splits = exchange.exchange_counts(torch.ones(EP_SIZE, dtype=torch.int64))
        rows = torch.full((splits.num_sent, 1), cell, dtype=torch.int64)
        return exchange.exchange_rows(rows, splits).flatten().tolist()

    def start(context: RankContext) -> tuple[list[int], list[int]]:
        cell, rank = divmod(context.rank, EP_SIZE)
        all_ranks.wait(START_SECONDS)
        if rank > 0:
            return join(context, cell, rank, rendezvous[cell].get()), []
        with engine_sockets(FIRST) as ports:
            store = host_store(LOOPBACK, 0, START_SECONDS)
            rendezvous[cell].put(store.port)
            met = join(context, cell, rank, store.port)
            all_engines.wait(START_SECONDS)  # all ports are held at one time
            return met, [*ports, store.port]

    answers = run_ranks(NUM_CELLS * EP_SIZE, start)

    assert [met for met, _ in answers] == [[i // EP_SIZE] * EP_SIZE for i in range(len(answers))]
    ports = [port for _, ports in answers for port in ports]
    assert len(set(ports)) == len(ports) == NUM_CELLS * 4


@pytest.mark.parametrize("taken", [0, 1, 2], ids=["clients", "workers", "routes"])
def test_an_engines_port_that_somebody_took_in_between_is_named_and_may_be_tried_again(
    taken: int,
) -> None:
    with engine_sockets(FIRST) as ports:
        next_life = FIRST.after_this(ports)
    with (
        socket.create_server((LOOPBACK, ports[taken])),
        pytest.raises(CellError, match=f"{LOOPBACK}:{ports[taken]} cannot be bound: Address alr"),
        engine_sockets(next_life),
    ):
        pass
    with engine_sockets(next_life) as again:  # a start that failed has left none of them taken
        assert again == ports
