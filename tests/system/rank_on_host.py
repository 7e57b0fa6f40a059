"""One of two ranks, on a host of its own: meets the other, sends it its number, tells what it has heard and listens on.

    python tests/system/rank_on_host.py RANK ADDRESS [STORE_ADDRESS STORE_PORT]

Without a store it hosts one and tells its port in a line of its own first. Lines are JSON. Rank 1 comes to the last
exchange when it is told a line; what rank 0 is told is the address of a host that is gone.
"""

import json
import sys
import threading

import psutil
import torch

from deploy.lost_hosts import end_connections_to
from expert_workers.ep_group import GroupOptions, connect_store, host_store, join_group
from expert_workers.exchange.base import ExchangeError

SECONDS = 60.0


def main(rank: int, address: str, store_address: str, store_port: int) -> None:
    options = GroupOptions(
        rank=rank,
        ep_size=2,
        exchange="gloo",
        host_address=address,
        store_address=store_address,
        store_port=store_port,
        join_timeout_seconds=SECONDS,
        exchange_timeout_seconds=SECONDS,
    )
    group = join_group(options, connect_store(options))
    splits = group.exchange.exchange_counts(torch.tensor([1, 1]))
    rows = group.exchange.exchange_rows(torch.tensor([[rank], [rank]]), splits)
    connections = psutil.Process().net_connections("inet")
    listening = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
    told = {"heard": rows.flatten().tolist(), "listening": sorted(set(listening))}
    print(json.dumps(told), flush=True)
    if rank:
        sys.stdin.readline()
    else:
        threading.Thread(target=let_go_of_told_hosts, daemon=True).start()
    try:
        group.exchange.exchange_counts(torch.tensor([0, 0]))
    except ExchangeError as error:
        print(json.dumps({"broken": str(error)}), flush=True)
    group.leave()


def let_go_of_told_hosts() -> None:
    for line in sys.stdin:
        end_connections_to([line.strip()])


if __name__ == "__main__":
    rank, address, *place = sys.argv[1:]
    if place:
        main(int(rank), address, place[0], int(place[1]))
    else:
        store = host_store(address, 0, SECONDS)
        print(json.dumps(store.port), flush=True)
        main(int(rank), address, address, store.port)
