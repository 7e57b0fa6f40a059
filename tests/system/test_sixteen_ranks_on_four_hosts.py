"""Four hosts, `pointsman up` from a fifth, sixteen ranks as 4 × 4, requests, `pointsman down`, and nothing is left."""

import re

import pytest

from tests.helpers.hosts.cluster_files import write_cluster_file
from tests.helpers.hosts.desk import Said, complete, get, left_on, pointsman, record
from tests.helpers.hosts.fleet import fleet_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]
PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form"


def ranks_by_host(up: Said) -> dict[str, list[int]]:
    """As `up` prints them."""
    lines = [line for line in up.output.splitlines() if line.startswith("host ")]
    return {
        line.removeprefix("host ").partition(": ")[0]: [
            int(rank) for rank in re.findall(r"rank (\d+) on cpu", line)
        ]
        for line in lines
    }


def test_sixteen_ranks_on_four_hosts_answer_and_nothing_is_left() -> None:
    with fleet_of(5) as fleet:
        *hosts, desk = fleet.hosts
        head = hosts[0]
        file = str(write_cluster_file(fleet, hosts, ranks_per_host=4))
        up = pointsman(
            desk, "up", file, *("--ep-size", "16", "--host", head.address),
            *("--num-kv-blocks", "64", "--max-model-len", "1024", "--deterministic"),
            *("--set", "cluster.hosts_timeout_seconds=600"),
            *("--set", "cell.start_timeout_seconds=900", "--set", "scheduler.plan_wait_seconds=60"),
        )  # fmt: skip
        assert up.code == 0, str(up)
        url = f"http://{head.address}:8000"
        assert up.output.splitlines()[-1].startswith(f"pointsman is ready: {url} ")
        printed = ranks_by_host(up)
        assert sorted(printed) == sorted(host.address for host in hosts)
        assert printed[head.address] == [0, 1, 2, 3]
        assert sorted(printed.values()) == [
            [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(4)
        ]
        status = get(head, "http://127.0.0.1:8001/admin/status")
        assert {place["rank"]: place["host"] for place in status["ranks"]} == {
            rank: host for host, ranks in printed.items() for rank in ranks
        }

        first = complete(desk, url, prompt=PROMPT, max_tokens=12)
        assert first["usage"]["completion_tokens"] == 12
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = complete(desk, url, prompt=PROMPT, max_tokens=12)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert again["choices"][0]["text"] == first["choices"][0]["text"]

        refused = pointsman(desk, "up", file)
        assert refused.code == 1
        assert "cluster pointsman serves already (process " in refused.failures[-1]

        down = pointsman(desk, "down", file)
        assert down.code == 0, str(down)
        assert {host.name: left_on(host) for host in fleet.hosts} == {
            host.name: [] for host in fleet.hosts
        }
        once_more = pointsman(desk, "down", file)
        assert once_more.code == 0, str(once_more)
        record("4 hosts x 4 ranks", [f"up {up.seconds:.0f} s", f"down {down.seconds:.0f} s"])
