"""What a cell opens to the network, and what somebody on it can do who has no key."""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from tests.helpers.served import Served
from tests.integration.api import CellApi, random_prompt

pytestmark = pytest.mark.ray
ANY_ADDRESS = {"0.0.0.0", "::"}
INTRUDER = Path(__file__).parent / "intruder.py"


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    connections = process.net_connections("inet")
    return [tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN]


def test_a_cells_own_sockets_listen_on_one_address_and_only_rays_on_all(
    shared_cell: Served, api: CellApi
) -> None:
    """Ray opens one socket in every process that it starts or is used from, on every address of the host."""
    on_all_addresses: dict[str, int] = defaultdict(int)
    on_one_address: dict[str, set[str]] = defaultdict(set)
    for pid, actor in actors(shared_cell).items():
        for address, _ in listening(psutil.Process(pid)):
            if address in ANY_ADDRESS:
                on_all_addresses[actor] += 1
            else:
                on_one_address[actor].add(address)
    assert on_all_addresses == {"Engine": 1, "HttpServer": 1, "ExpertWorker": 4, "launcher": 1}
    assert on_one_address["HttpServer"] == {"127.0.0.1"}
    assert on_one_address["Engine"] == on_one_address["ExpertWorker"]  # the host's, as Ray knows it
    assert len(on_one_address["Engine"]) == 1


def actors(served: Served) -> dict[int, str]:
    """Processes of ours by pid; the others are Ray's."""
    kinds = ("Engine", "HttpServer", "ExpertWorker")
    found = {pid: kind for kind in kinds for pid in served.pids_of(kind)}
    assert len(found) == 6
    return found | {served.process.pid: "launcher"}


def test_who_has_no_key_reads_nothing_changes_nothing_and_is_seen(
    shared_cell: Served, api: CellApi
) -> None:
    prompt = random_prompt(771, 100)
    before_answer, before = api.complete(prompt, 8), api.metrics()
    engine = listening(psutil.Process(shared_cell.pid_of("Engine")))
    ours = [(host, port) for host, port in engine if host not in ANY_ADDRESS]
    assert len(ours) == 3
    command = [sys.executable, str(INTRUDER), ours[0][0], *(str(port) for _, port in ours)]
    intruder = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert intruder.stdout == "0\n"
    answer, rise = api.complete(prompt, 8), api.rise_since(before)
    assert answer["choices"] == before_answer["choices"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96  # nothing was evicted
    assert rise["pointsman_requests_finished_total", ("length",)] == 1
    assert rise["pointsman_channel_refusals_total", ("handshake",)] >= 24
    assert "peer refused reason=handshake" in shared_cell.stderr
    assert "says who" not in shared_cell.stderr
