"""A cell's place in the Ray cluster: one placement group for all of it, or none."""

import time
from dataclasses import dataclass
from typing import Any

import ray
import ray.util
from ray._private.state import available_resources_per_node  # of each host; public is the sum only
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import DeadlineError
from deploy.room import CellDemand, HostRoom, HostShare, host_shares, share_of_ranks, shortage

GROUP_SECONDS = 5.0
"""Room that was free a moment ago is given in milliseconds; after so long somebody else has it."""
LOOK_SECONDS = 0.5
_PIN = 0.001
"""Of the resource that Ray gives each host under its address; it keeps a bundle there and takes nothing."""


@dataclass(frozen=True)
class Reservation:
    """Owner of the placement group: a bundle per host, the first with room for engine and HTTP servers."""

    group: Any
    bundle_of_rank: tuple[int, ...]

    def for_rank(self, rank: int) -> PlacementGroupSchedulingStrategy:
        return self._in_bundle(self.bundle_of_rank[rank])

    def for_front(self) -> PlacementGroupSchedulingStrategy:
        return self._in_bundle(0)

    def release(self) -> None:
        """Ends whatever still runs in it. Idempotent."""
        ray.util.remove_placement_group(self.group)

    def _in_bundle(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)


def reserve(demand: CellDemand, seconds: float) -> Reservation:
    """All that the cell needs, at once. Raises DeadlineError with what is missing: at once where the cluster is too
    small, after `seconds` where others hold what is needed; nothing stays reserved then.
    """
    deadline = time.monotonic() + seconds
    while True:
        free, totals = _rooms(available_resources_per_node()), total_rooms()
        shares = host_shares(free, demand)
        if shares is not None:
            reservation = _try_to_reserve(shares, demand, deadline)
            if reservation is not None:
                return reservation
        if time.monotonic() > deadline or host_shares(totals, demand) is None:
            raise DeadlineError(shortage(free, totals, demand))
        time.sleep(LOOK_SECONDS)


def total_rooms() -> list[HostRoom]:
    """Every host of the cluster as if nothing ran on it."""
    return _rooms(_total_resources())


def _try_to_reserve(
    shares: tuple[HostShare, ...], demand: CellDemand, deadline: float
) -> Reservation | None:
    """None when somebody else was faster. Ray gives a group all its bundles or none, so two cells that want the same
    hosts never hold a part each. Which host takes a bundle is Ray's choice, but for the first."""
    bundles = [_bundle(share, demand) for share in shares]
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
    reservation = Reservation(group, share_of_ranks(shares))
    try:
        if group.wait(min(GROUP_SECONDS, max(1.0, deadline - time.monotonic()))):
            return reservation
    except BaseException:  # an interrupt too must leave nothing reserved
        reservation.release()
        raise
    reservation.release()
    return None


def _bundle(share: HostShare, demand: CellDemand) -> dict[str, float]:
    bundle = {"CPU": float(share.num_ranks), "GPU": float(share.num_ranks * demand.rank_gpus)}
    if share.has_front:
        address = _address(_total_resources()[share.host_id])
        bundle["CPU"] += demand.front_cpus
        bundle[f"node:{address}"] = _PIN
    return {name: amount for name, amount in bundle.items() if amount}


def _total_resources() -> dict[str, dict[str, float]]:
    return {host["NodeID"]: host["Resources"] for host in ray.nodes() if host["Alive"]}


def _rooms(resources: dict[str, dict[str, float]]) -> list[HostRoom]:
    return [
        HostRoom(host_id, _address(of_host), of_host.get("CPU", 0.0), of_host.get("GPU", 0.0))
        for host_id, of_host in resources.items()
    ]


def _address(resources: dict[str, float]) -> str:
    """Ray gives each host a resource named after its address, and the head a second one."""
    names = (name.removeprefix("node:") for name in resources if name.startswith("node:"))
    return next((name for name in names if name != "__internal_head__"), "?")
