"""Ranks on hosts whose names and environment would lead them astray: two interfaces, a name that means loopback, a
variable that names the wrong interface."""

import json
import subprocess
import sys
from pathlib import Path

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
    return subprocess.Popen(host.entering(command), stdout=subprocess.PIPE, text=True)


def test_ranks_meet_and_listen_on_the_address_of_the_cluster_and_nowhere_else() -> None:
    with fleet_of(2) as fleet:
        for number, host in enumerate(fleet.hosts):
            with_a_second_interface_and_a_name_on_loopback(host, number)
        first, second = (host.address for host in fleet.hosts)
        hosting = start(fleet.hosts[0], 0, first)
        assert hosting.stdout is not None
        port = json.loads(hosting.stdout.readline())
        joining = start(fleet.hosts[1], 1, second, first, port)
        told = [json.loads(p.communicate(timeout=SECONDS)[0]) for p in (hosting, joining)]
        assert (hosting.returncode, joining.returncode) == (0, 0)
    assert told == [
        {"heard": [0, 1], "listening": [first]},
        {"heard": [0, 1], "listening": [second]},
    ]
