"""Which hosts take how many ranks, over plain data."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.room import (
    CellDemand,
    HostRoom,
    HostShare,
    host_shares,
    share_of_ranks,
    shortage,
)


def rooms(*cpus: float, gpus: Sequence[float] = ()) -> list[HostRoom]:
    """Hosts a, b, c … ; the front is on a."""
    of_gpus = [*gpus, *([0.0] * (len(cpus) - len(gpus)))]
    return [
        HostRoom(chr(ord("a") + i), f"10.0.0.{i + 1}", free, of_gpus[i])
        for i, free in enumerate(cpus)
    ]


def demand(num_ranks: int, *, rank_gpus: int = 0, front_cpus: float = 1.0) -> CellDemand:
    return CellDemand(num_ranks, rank_gpus, "a", front_cpus)


def counts(shares: tuple[HostShare, ...] | None) -> dict[str, int] | None:
    return None if shares is None else {share.host_id: share.num_ranks for share in shares}


def test_sixteen_ranks_on_four_hosts_of_five_cpus_are_four_by_four() -> None:
    assert counts(host_shares(rooms(5, 5, 5, 5), demand(16))) == {"a": 4, "b": 4, "c": 4, "d": 4}


def test_as_few_hosts_as_hold_all_ranks_take_them() -> None:
    assert counts(host_shares(rooms(17, 16, 16, 16), demand(16))) == {"a": 16}


def test_sixteen_gpu_ranks_fill_two_hosts_of_eight() -> None:
    shares = host_shares(rooms(96, 96, 96, gpus=[8, 8, 8]), demand(16, rank_gpus=1))
    assert counts(shares) == {"a": 8, "b": 8}


def test_a_head_without_gpus_takes_the_front_and_no_rank() -> None:
    shares = host_shares(rooms(4, 32, 32, gpus=[0, 8, 8]), demand(16, rank_gpus=1))
    assert shares == (
        HostShare("a", 0, has_front=True),
        HostShare("b", 8, has_front=False),
        HostShare("c", 8, has_front=False),
    )


def test_uneven_hosts_are_loaded_as_evenly_as_they_can_be() -> None:
    assert counts(host_shares(rooms(7, 3, 6), demand(14))) == {"a": 6, "b": 3, "c": 5}


def test_ranks_that_follow_each_other_are_on_one_host() -> None:
    shares = (HostShare("a", 2, has_front=True), HostShare("b", 3, has_front=False))
    assert share_of_ranks(shares) == (0, 0, 1, 1, 1)


@pytest.mark.parametrize(
    "too_small",
    [rooms(5, 5, 5, 4.5)[:3], rooms(0.5, 20), rooms(4.9, 4, 4, 4)],
    ids=["a host is missing", "no room for the front", "one CPU is missing"],
)
def test_without_room_for_all_there_is_no_share_at_all(too_small: list[HostRoom]) -> None:
    assert host_shares(too_small, demand(16)) is None


def test_a_shortage_names_what_each_host_has_free() -> None:
    line = shortage(rooms(1, 4), rooms(5, 4), demand(8))
    assert line.startswith(
        "no room for 8 ranks of 1 CPU each beside engine and HTTP servers (1 CPU on 10.0.0.1): "
        "free are 1 of 5 CPUs on 10.0.0.1, 4 of 4 CPUs on 10.0.0.2; "
    )


def test_a_shortage_tells_gpus_where_ranks_need_them() -> None:
    line = shortage([], rooms(8, gpus=[8]), demand(8, rank_gpus=1))
    assert "free are 0 of 8 CPUs and 0 of 8 GPUs on 10.0.0.1" in line


@settings(max_examples=150, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 24))
def test_shares_hold_every_rank_once_and_exceed_no_host(cpus: list[int], num_ranks: int) -> None:
    hosts = rooms(*map(float, cpus))
    shares = host_shares(hosts, demand(num_ranks))
    limits = {h.host_id: int(h.cpus) - (h.host_id == "a") for h in hosts}
    fits = cpus[0] >= 1 and sum(limits.values()) >= num_ranks
    assert (shares is not None) == fits
    for share in shares or ():
        assert share.num_ranks <= limits[share.host_id]
    assert len(share_of_ranks(shares or ())) == (num_ranks if fits else 0)
