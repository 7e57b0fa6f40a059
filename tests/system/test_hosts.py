"""The hosts that the other system tests run on: they are apart, can be cut off and killed, and leave nothing."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hosts.fleet import Fleet, fleet_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


def ssh(fleet: Fleet, target: int, command: str) -> "subprocess.CompletedProcess[str]":
    """From host 0 to another one, over the network."""
    settings = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "ConnectTimeout=2")
    flags = [flag for setting in settings for flag in ("-o", setting)]
    there = ["ssh", "-q", "-i", str(fleet.key), *flags, fleet.hosts[target].address, command]
    return subprocess.run(
        fleet.hosts[0].entering(there), capture_output=True, text=True, timeout=30
    )


def answers(fleet: Fleet, target: int) -> bool:
    return ssh(fleet, target, "true").returncode == 0


def _links() -> list[str]:
    lines = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout.splitlines()
    return [line.split(":")[1].strip().partition("@")[0] for line in lines]


def test_hosts_are_apart_reach_each_other_and_leave_nothing() -> None:
    with fleet_of(2) as fleet:
        directory, first, second = fleet.directory, *fleet.hosts
        links = [name for name in _links() if name.startswith(first.network)]
        assert len(links) == 3
        told = ssh(fleet, 1, "hostname; echo ~; touch /tmp/mine /dev/shm/mine")
        assert told.stdout.split() == ["h1", str(second.home)]
        assert "mine" not in first.run("ls /tmp /dev/shm")
        assert second.run("ls /tmp /dev/shm").count("mine") == 2
        with subprocess.Popen(second.entering(["sleep", "600"])):
            assert "sleep" not in first.run("cat /proc/[0-9]*/comm")
            assert second.signal("sleep 600", signal.SIGTERM) > 0
    assert not directory.exists()
    assert first.processes() + second.processes() == []
    assert [name for name in _links() if name in links] == []


def test_a_host_that_is_cut_off_or_killed_is_not_reached_until_it_is_back() -> None:
    with fleet_of(2) as fleet:
        other = fleet.hosts[1]
        assert answers(fleet, 1)
        other.cut()
        assert not answers(fleet, 1)
        assert other.run("echo alive").strip() == "alive"
        other.heal()
        assert answers(fleet, 1)
        (other.home / "kept").touch()
        other.run("touch /tmp/lost")
        other.kill()
        assert not answers(fleet, 1)
        other.boot()
        assert answers(fleet, 1)
        assert (other.home / "kept").exists()
        assert "lost" not in other.run("ls /tmp")


ABANDON = """
import os, signal
from tests.helpers.hosts.fleet import fleet_of
with fleet_of(1) as fleet:
    print(fleet.hosts[0].network, fleet.directory, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_test_has_left_is_removed_by_the_next_one() -> None:
    killed = subprocess.run([sys.executable, "-c", ABANDON], capture_output=True, text=True)
    network, directory = killed.stdout.split()
    assert [name for name in _links() if name.startswith(network)]
    with fleet_of(1):
        assert not [name for name in _links() if name.startswith(network)]
        assert not Path(directory).exists()


def test_two_fleets_at_once_do_not_collide() -> None:
    with fleet_of(1) as one, fleet_of(1) as two:
        assert one.hosts[0].address != two.hosts[0].address
        assert one.hosts[0].run("hostname") == two.hosts[0].run("hostname") == "h0\n"
