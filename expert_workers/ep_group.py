"""The expert-parallel process group of one cell: rendezvous, backend, network interface, end.

Ranks meet in a TCPStore that the caller places. Only torch.distributed's default group exists in a worker.
"""

import os
import socket
import time
from dataclasses import dataclass, replace
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
    TCPStore,
)  # typed here, re-exported untyped
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from cluster.errors import CellError, ConfigError
from cluster.types import ExchangeKind
from expert_workers.exchange.counting import CountingExchange
from expert_workers.exchange.no_group import NoGroupExchange
from expert_workers.exchange.torch_group import TorchGroupExchange

ATTEMPT_SECONDS = 1.0
"""To connect to a store and be answered. One on a busy host may need several."""
MAX_SILENT_ATTEMPTS = 3
"""In a row, before a store that neither answers nor refuses counts as gone."""
CONNECT_SECONDS = 30.0
"""For all of them."""
MEET_SECONDS = 30.0
"""For each connection between ranks that have all arrived. gloo tries five times, whatever it is told in between, to
reach a rank that died when it had said where it listens."""
MEET_AGAIN_SECONDS = 5.0
"""The same after a loss, when another one is likelier and a meeting that fails is followed by the next."""


@dataclass(frozen=True)
class GroupOptions:
    """What one rank needs to join.

    host_address:  IP address of this host that the other ranks can reach (the one that Ray uses)
    store_address, store_port: where the group's TCPStore listens
    group_name:    of the cell alone, so that none but its ranks meet there; the store itself asks nobody who they are
    join_timeout_seconds:      until all ranks are there; weights may still be loading elsewhere
    exchange_timeout_seconds:  of every exchange afterwards
    meet_timeout_seconds:      of each connection before, with gloo
    """

    rank: int
    ep_size: int
    exchange: ExchangeKind
    host_address: str
    store_address: str
    store_port: int
    join_timeout_seconds: float
    exchange_timeout_seconds: float
    group_name: str = "ep_group"
    meet_timeout_seconds: float = MEET_SECONDS


class EpGroup:
    """Owner of this process's group, of its end of the store and of the rank's one exchange, which counts all that the
    rank sends and stays the same object while groups come and go."""

    def __init__(
        self, options: GroupOptions, process_group: dist.ProcessGroup, store: Store
    ) -> None:
        self.process_group: dist.ProcessGroup | None = process_group
        self.exchange = CountingExchange(TorchGroupExchange(process_group), options.rank)
        self._options = options
        self._store: Store | None = store  # a hosted store listens as long as it is referenced

    def leave(self) -> None:
        """Peers in an exchange with this rank see their connection close. Idempotent."""
        self.exchange.replace(NoGroupExchange(self._options.rank))
        self.process_group = self._store = None
        leave_group()

    def rejoin_at(self, store_address: str, store_port: int, timeout_seconds: float) -> None:
        """Leaves, and joins the group that meets at this store. Raises CellError, and is in no group then."""
        self.leave()
        options = replace(
            self._options,
            store_address=store_address,
            store_port=store_port,
            join_timeout_seconds=timeout_seconds,
            meet_timeout_seconds=MEET_AGAIN_SECONDS,
        )
        store = connect_store(options)
        self.process_group = _join(options, store)
        self._store = store
        self.exchange.replace(TorchGroupExchange(self.process_group))


def host_store(address: str, port: int, timeout_seconds: float) -> TCPStore:
    """Listens for the group's ranks; port 0 takes a free one, told by `.port`. Lives as long as the object.

    The socket is bound here, to this one address: left to itself the store listens on all of the host's.
    Raises CellError when the address cannot be bound.
    """
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, port), family=family)
    except OSError as error:
        raise CellError(f"no rendezvous store at {address}:{port}: {error.strerror}") from error
    with listener:
        bound_port = listener.getsockname()[1]
        try:
            store = TCPStore(
                address,
                bound_port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_seconds),
                master_listen_fd=listener.fileno(),
            )
        except RuntimeError as error:
            raise CellError(f"no rendezvous store at {address}:{bound_port}: {error}") from error
        listener.detach()  # the store's from now on
    return store


def connect_store(options: GroupOptions) -> Store:
    """Raises CellError naming rank, host, address and port: at once when nobody listens there.

    Whoever hosts the store listens before anybody is told of it. Left to itself a client tries for all its time, so
    that a host that died meanwhile would hold the ranks that another group waits for.
    """
    began = time.monotonic()
    deadline = began + min(CONNECT_SECONDS, options.join_timeout_seconds)
    while True:
        try:
            store = TCPStore(
                options.store_address,
                options.store_port,
                is_master=False,
                timeout=timedelta(seconds=min(ATTEMPT_SECONDS, options.join_timeout_seconds)),
            )
        except RuntimeError as error:
            if time.monotonic() < deadline and _listens(options):
                continue
            tried = replace(options, join_timeout_seconds=round(time.monotonic() - began, 1))
            raise _cannot_join(tried, str(error)) from error
        store.set_timeout(timedelta(seconds=options.join_timeout_seconds))
        return PrefixStore(options.group_name, store)


def join_group(options: GroupOptions, store: Store) -> EpGroup:
    """Blocks until all ranks have joined. Raises CellError naming the ranks that did not come.

    Sets GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME of this process: neither library takes the interface as an argument.
    """
    return EpGroup(options, _join(options, store), store)


def _join(options: GroupOptions, store: Store) -> dist.ProcessGroup:
    interface = interface_of(options.host_address)
    os.environ.update(interface_settings(options.exchange, interface))
    _wait_for_all_ranks(options, store)
    seconds = options.exchange_timeout_seconds
    if options.exchange == "gloo":
        seconds = min(seconds, options.meet_timeout_seconds)
    try:
        dist.init_process_group(
            backend=options.exchange,
            store=PrefixStore("ep_group", store),
            rank=options.rank,
            world_size=options.ep_size,
            timeout=timedelta(seconds=seconds),
        )
    except RuntimeError as error:
        _forget_failed_group()
        raise _cannot_join(options, f"interface {interface}: {error}") from error
    group = dist.group.WORLD
    assert group is not None
    _set_pg_timeout(timedelta(seconds=options.exchange_timeout_seconds), group)
    return group


def _forget_failed_group() -> None:
    """torch names the keys of a group by how many came before, and counts one that failed for ever: its rank would
    look for the next one under another name than new processes do."""
    _world.group_count = 0


def leave_group() -> None:
    """Ends the default group of this process, if there is one. Peers in an exchange see their connection close."""
    if dist.is_initialized():
        dist.destroy_process_group()


def interface_of(address: str) -> str:
    """Name of the network interface that owns an IP address of this host. Raises ConfigError."""
    interfaces = psutil.net_if_addrs()
    for name, owned in interfaces.items():
        if any(entry.address.partition("%")[0] == address for entry in owned):
            return name
    raise ConfigError(
        f"no network interface of this host owns {address}; it has {', '.join(sorted(interfaces))}"
    )


def interface_settings(exchange: ExchangeKind, interface: str) -> dict[str, str]:
    """What the library of an exchange reads from the environment. gloo takes a name; NCCL takes prefixes, of which eth1
    means eth10 too, unless they follow a = sign (its manual, NCCL_SOCKET_IFNAME)."""
    if exchange == "nccl":
        return {"NCCL_SOCKET_IFNAME": f"={interface}"}
    return {"GLOO_SOCKET_IFNAME": interface}


def _listens(options: GroupOptions) -> bool:
    """Whoever refuses a connection does not; one that says nothing may be busy, for a while."""
    address = options.store_address, options.store_port
    for _ in range(MAX_SILENT_ATTEMPTS):
        try:
            with socket.create_connection(address, timeout=ATTEMPT_SECONDS):
                return True
        except TimeoutError:
            continue
        except OSError:
            return False
    return False


def _wait_for_all_ranks(options: GroupOptions, store: Store) -> None:
    """A wait of its own, so that its timeout can be longer than an exchange's and its error can name who is missing."""
    keys = [f"arrived/{rank}" for rank in range(options.ep_size)]
    try:
        store.set(keys[options.rank], options.host_address)
        store.wait(keys, timedelta(seconds=options.join_timeout_seconds))
    except RuntimeError as error:
        raise _cannot_join(options, _missing_ranks(options, store, error)) from error


def _missing_ranks(options: GroupOptions, store: Store, error: RuntimeError) -> str:
    try:
        missing = [r for r in range(options.ep_size) if not store.check([f"arrived/{r}"])]
    except RuntimeError:
        return f"the store is gone: {error}"
    return f"rank {', '.join(map(str, missing))} did not arrive"


def _cannot_join(options: GroupOptions, reason: str) -> CellError:
    return CellError(
        f"rank {options.rank} on host {options.host_address} could not join the EP group of "
        f"{options.ep_size} at {options.store_address}:{options.store_port} within "
        f"{options.join_timeout_seconds:g} s: {reason.strip().partition(chr(10))[0]}"
    )
