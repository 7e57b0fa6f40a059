"""Before a cell is planned on a cluster that runs: are all hosts there, does each hold its share. No Ray is needed."""

from dataclasses import replace

from cluster.config import ClusterSection, load_config
from deploy.joined_ray import misfits, missing_hosts
from deploy.planning import plan_cell_on
from deploy.room import CellDemand, HostRoom
from expert_workers.device import HostDevices
from tests.deploy.test_preflight import GOOD

A, B = "10.0.0.1", "10.0.0.2"
ROOMS = (HostRoom("a", A, 3.0, 0.0), HostRoom("b", B, 2.0, 0.0))
FACTS = (GOOD, replace(GOOD, address=B))
NEEDS = CellDemand(num_ranks=4, rank_gpus=0, front_host_id="a", front_cpus=1.0)
PLAN = plan_cell_on(load_config(None, {"cell.ep_size": 4}), HostDevices("cpu", 0))


def test_hosts_that_are_not_there_are_named() -> None:
    expected = ClusterSection(hosts=(A, B, "10.0.0.3"))
    assert missing_hosts(expected, [B]) == "no Ray on host 10.0.0.1, 10.0.0.3"
    assert missing_hosts(expected, [A, B, "10.0.0.3", "10.0.0.4"]) == ""


def test_hosts_without_names_are_counted() -> None:
    expected = ClusterSection(num_hosts=3)
    assert missing_hosts(expected, [A, B]) == "2 of 3 hosts are there (10.0.0.1, 10.0.0.2)"
    assert missing_hosts(expected, [A, B, "10.0.0.3"]) == ""


def test_a_cell_that_fits_its_hosts_has_no_misfit() -> None:
    assert misfits(PLAN, NEEDS, ROOMS, FACTS) == ()


def test_a_cluster_that_is_too_small_is_told_at_once() -> None:
    (line,) = misfits(PLAN, replace(NEEDS, num_ranks=5), ROOMS, FACTS)
    assert line.startswith("no room for 5 ranks of 1 CPU each")


def test_a_host_whose_memory_is_too_small_for_its_share_is_named() -> None:
    small = replace(GOOD, address=B, memory_bytes=2**27)
    (line,) = misfits(PLAN, NEEDS, ROOMS, (GOOD, small))
    assert line.startswith(f"host {B}: 2 ranks that take ")


ENGINE_BYTES = PLAN.route_budget_bytes + PLAN.score_budget_bytes
RANK_BYTES = PLAN.weight_bytes_per_rank + PLAN.kv_bytes_per_rank + PLAN.plan_budget_bytes


def test_a_host_of_ranks_alone_needs_no_room_for_the_engine() -> None:
    enough = replace(GOOD, address=B, memory_bytes=2 * RANK_BYTES)
    assert misfits(PLAN, NEEDS, ROOMS, (GOOD, enough)) == ()
    too_small = replace(enough, memory_bytes=enough.memory_bytes - 1)
    (line,) = misfits(PLAN, NEEDS, ROOMS, (GOOD, too_small))
    assert line.startswith(f"host {B}: 2 ranks that take {RANK_BYTES} bytes ")
    assert f" each exceed this host's memory ({2 * RANK_BYTES - 1} bytes): lower " in line


def test_a_host_without_ranks_needs_room_for_the_engine() -> None:
    rooms = (HostRoom("a", A, 1.0, 0.0), HostRoom("b", B, 4.0, 0.0))
    enough = replace(GOOD, memory_bytes=ENGINE_BYTES)
    assert misfits(PLAN, NEEDS, rooms, (enough, FACTS[1])) == ()
    too_small = replace(enough, memory_bytes=ENGINE_BYTES - 1)
    (line,) = misfits(PLAN, NEEDS, rooms, (too_small, FACTS[1]))
    assert line.startswith(f"host {A}: an engine that takes {ENGINE_BYTES} bytes ")
    assert " exceeds this host's memory " in line


def test_a_host_of_both_needs_room_for_both() -> None:
    too_small = replace(GOOD, memory_bytes=ENGINE_BYTES + 2 * RANK_BYTES - 1)
    (line,) = misfits(PLAN, NEEDS, ROOMS, (too_small, FACTS[1]))
    assert line.startswith(f"host {A}: 2 ranks that take ")
    assert " each and an engine that takes " in line
