"""Ranks on hosts whose names and environment would lead them astray: two interfaces, a name that means loopback, a
variable that names the wrong interface."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.hosts.fleet import REPOSITORY, fleet_of
from tests.helpers.hosts.host import Host

pytestmark = pytest.mark.system
RANK = Path(__file__).parent / "rank_on_host.py"
SECONDS = 120.0


def with_a_second_interface_and_a_name_on_loopback(host: Host, number: int) -> None:
    """As Debian names a host in its own /etc/hosts."""
    host.run(
        f"ip link add eth1 type veth peer name eth1-end && ip addr add 10.1.{number}.1/24 dev eth1 "
        "&& ip link set eth1 up && ip link set eth1-end up "
        f"&& (echo 127.0.1.1 {host.name}; grep -v ' {host.name}$' /etc/hosts) > /tmp/hosts "
        "&& mount --bind /tmp/hosts /etc/hosts"
    )
    assert host.run(f"getent hosts {host.name}").split()[0] == "127.0.1.1"


def start(host: Host, *arguments: object) -> "subprocess.Popen[str]":
    environment = (f"PYTHONPATH={REPOSITORY}", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo")
    command = ["env", *environment, sys.executable, str(RANK), *map(str, arguments)]
    return subprocess.Popen(
        host.entering(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def next_line(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def wait_until_stuck(process: "subprocess.Popen[str]") -> None:
    """It waits in the kernel and takes no time any more."""
    (rank,) = psutil.Process(process.pid).children(recursive=True) or [psutil.Process(process.pid)]
    spent = -1.0
    while spent != (spent := sum(rank.cpu_times()[:2])):
        time.sleep(0.5)


def test_ranks_meet_and_listen_on_the_address_of_the_cluster_and_nowhere_else() -> None:
    with fleet_of(2) as fleet:
        for number, host in enumerate(fleet.hosts):
            with_a_second_interface_and_a_name_on_loopback(host, number)
        first, second = (host.address for host in fleet.hosts)
        hosting = start(fleet.hosts[0], 0, first)
        joining = start(fleet.hosts[1], 1, second, first, next_line(hosting))
        tell(joining, "go on")
        told = [json.loads(p.communicate(timeout=SECONDS)[0]) for p in (hosting, joining)]
        assert (hosting.returncode, joining.returncode) == (0, 0)
    assert told == [
        {"heard": [0, 1], "listening": [first]},
        {"heard": [0, 1], "listening": [second]},
    ]


def test_a_rank_that_waits_for_a_host_without_power_is_freed_when_it_lets_go_of_it() -> None:
    with fleet_of(2) as fleet:
        first, second = fleet.hosts
        hosting = start(first, 0, first.address)
        joining = start(second, 1, second.address, first.address, next_line(hosting))
        assert (next_line(hosting)["heard"], next_line(joining)["heard"]) == ([0, 1], [0, 1])
        second.kill()
        wait_until_stuck(hosting)
        assert hosting.poll() is None
        began = time.monotonic()
        tell(hosting, second.address)
        assert "exchange of counts failed" in next_line(hosting)["broken"]
        assert time.monotonic() - began < SECONDS / 4
        for process in (hosting, joining):
            process.communicate(timeout=SECONDS)
        assert hosting.returncode == 0
