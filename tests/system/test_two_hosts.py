"""What `pointsman up`, `serve --address` and `down` say and leave when hosts differ, room is short, a host is away, or
Ray is up already."""

import subprocess
import time

import pytest

from deploy.planning import DEMO_MODEL
from tests.helpers.hosts.cluster_files import write_cluster_file
from tests.helpers.hosts.desk import Said, left_on, pointsman, pointsman_command, record
from tests.helpers.hosts.fleet import fleet_of
from tests.helpers.hosts.host import Host

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]
ANY_PORTS = ("--port", "0", "--admin-port", "0")
SERVE_SECONDS = 300.0


def start_cell(host: Host) -> "subprocess.Popen[str]":
    """Two ranks, of which each host has room for one."""
    command = pointsman_command(
        host, "serve", "--address", "auto", "--ep-size", "2", *ANY_PORTS,
        *("--set", "cell.placement_timeout_seconds=3"),
    )  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def bring_up(desk: Host, file: str) -> Said:
    return pointsman(
        desk, "up", file, "--ep-size", "2", "--model", "/tmp/model", *ANY_PORTS,
        *("--set", "cluster.hosts_timeout_seconds=600"),
    )  # fmt: skip


def num_named(host: Host, program: str) -> int:
    return [process.name() for process in host.processes()].count(program)


def test_hosts_that_differ_cells_that_compete_and_a_host_that_is_away() -> None:
    with fleet_of(3) as fleet:
        *hosts, desk = fleet.hosts
        head, other = hosts
        file = str(write_cluster_file(fleet, hosts, ranks_per_host=1))
        for host in hosts:  # under one path, which each host has for itself
            host.run(f"cp -r {DEMO_MODEL} /tmp/model")
        other.run("echo ' ' >> /tmp/model/config.json")
        other.cut()
        unreached = bring_up(desk, file)
        assert unreached.code == 1, str(unreached)
        assert unreached.failures[-1].startswith(f"pointsman: host {other.address}: not reached by")
        assert left_on(head) == []
        other.heal()

        ups = [bring_up(desk, file), bring_up(desk, file)]  # the second over an idle Ray
        for up in ups:
            assert up.code == 1, str(up)
            assert f"host {other.address}: the model directory holds other" in up.failures[-1]
        assert [num_named(host, "raylet") for host in hosts] == [1, 1]
        assert num_named(head, "gcs_server") == 1

        started = time.monotonic()
        cells = [start_cell(head), start_cell(head)]
        said = {}
        while len(said) < 1:
            said = {cell: cell.communicate()[1] for cell in cells if cell.poll() is not None}
            assert time.monotonic() < started + SERVE_SECONDS, "neither cell gave up"
            time.sleep(0.2)
        (loser,) = said
        assert loser.returncode == 1
        assert "pointsman: no room for 2 ranks of 1 CPU each" in said[loser]
        assert f"0 of 1 CPUs on {other.address}" in said[loser]
        (winner,) = [cell for cell in cells if cell is not loser]
        assert winner.stdout is not None
        assert winner.stdout.readline().startswith("pointsman is ready: ")

        other.cut()
        partly = pointsman(desk, "down", file)
        assert partly.code == 1, str(partly)
        assert partly.failures[-1].startswith(f"pointsman: host {other.address}: not reached: ")
        assert left_on(head) == []
        other.heal()
        down = pointsman(desk, "down", file)
        assert down.code == 0, str(down)
        assert {host.name: left_on(host) for host in fleet.hosts} == {
            host.name: [] for host in fleet.hosts
        }
        winner.communicate(timeout=60)
        seconds = [f"{said.seconds:.0f}" for said in (unreached, *ups)]
        record("2 hosts x 1 rank", [f"refused after {', '.join(seconds)} s"])
