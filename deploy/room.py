"""Which hosts take how many ranks of a cell. Pure: free resources in, shares out."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostRoom:
    """What one host of the Ray cluster has free. host_id: Ray's id of it"""

    host_id: str
    address: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class CellDemand:
    """What a cell needs. Its engine and HTTP servers share ports and so one host: that of `pointsman serve`.

    rank_gpus: 1 where ranks compute on GPUs, else 0
    """

    num_ranks: int
    rank_gpus: int
    front_host_id: str
    front_cpus: float


@dataclass(frozen=True)
class HostShare:
    """has_front: engine and HTTP servers too"""

    host_id: str
    num_ranks: int
    has_front: bool


def host_shares(rooms: Sequence[HostRoom], demand: CellDemand) -> tuple[HostShare, ...] | None:
    """The fewest hosts that hold all ranks, loaded evenly; the one with the front is first, be it without a rank.

    None when there is no room for all. Rows between ranks of one host never cross the network, and in lock-step the
    fullest host is everyone's pace.
    """
    front = next((room for room in rooms if room.host_id == demand.front_host_id), None)
    if front is None or front.cpus < demand.front_cpus:
        return None
    limits = {room.host_id: _limit(room, demand) for room in rooms}
    by_room = sorted(rooms, key=lambda r: (-limits[r.host_id], r is not front, r.address))
    chosen: list[HostRoom] = []
    for room in by_room:
        if sum(limits[c.host_id] for c in chosen) >= demand.num_ranks:
            break
        chosen.append(room)
    if sum(limits[c.host_id] for c in chosen) < demand.num_ranks:
        return None
    counts = _even(demand.num_ranks, {room.host_id: limits[room.host_id] for room in chosen})
    others = sorted((r for r in chosen if r is not front), key=lambda r: r.address)
    shares = [HostShare(front.host_id, counts.get(front.host_id, 0), has_front=True)]
    return (*shares, *(HostShare(r.host_id, counts[r.host_id], has_front=False) for r in others))


def share_of_ranks(shares: Sequence[HostShare]) -> tuple[int, ...]:
    """By rank, the index of its share: ranks that follow each other are on one host."""
    return tuple(i for i, share in enumerate(shares) for _ in range(share.num_ranks))


def shortage(rooms: Sequence[HostRoom], totals: Sequence[HostRoom], demand: CellDemand) -> str:
    """One line: what is needed, what each host has free of what it has, what to do."""
    front = next((r.address for r in totals if r.host_id == demand.front_host_id), "this host")
    per_rank = "1 CPU and 1 GPU" if demand.rank_gpus else "1 CPU"
    free = {room.host_id: room for room in rooms}
    hosts = ", ".join(
        _host_line(free.get(total.host_id), total, gpus=bool(demand.rank_gpus))
        for total in sorted(totals, key=lambda r: r.address)
    )
    return (
        f"no room for {demand.num_ranks} ranks of {per_rank} each beside engine and HTTP servers "
        f"({demand.front_cpus:g} CPU on {front}): free are {hosts}; end what holds the rest, add hosts, or "
        "lower --ep-size"
    )


def _limit(room: HostRoom, demand: CellDemand) -> int:
    reserved = demand.front_cpus if room.host_id == demand.front_host_id else 0.0
    by_cpu = int(room.cpus - reserved)
    return min(by_cpu, int(room.gpus)) if demand.rank_gpus else by_cpu


def _even(num_ranks: int, limits: dict[str, int]) -> dict[str, int]:
    """The smallest hosts are filled first, with at most an even share of what is left."""
    counts: dict[str, int] = {}
    left = num_ranks
    for position, (host_id, limit) in enumerate(sorted(limits.items(), key=lambda kv: kv[1])):
        even = -(-left // (len(limits) - position))
        counts[host_id] = min(limit, even)
        left -= counts[host_id]
    return counts


def _host_line(free: HostRoom | None, total: HostRoom, *, gpus: bool) -> str:
    cpus = f"{free.cpus if free else 0:g} of {total.cpus:g} CPUs"
    of_gpus = f" and {free.gpus if free else 0:g} of {total.gpus:g} GPUs" if gpus else ""
    return f"{cpus}{of_gpus} on {total.address}"
