"""The end of ranks that Ray does not reach any more. No Ray: what has come of their calls is given."""

import os
import signal
import subprocess
from typing import Any

import ray.util

from cluster.config import ClusterSection
from cluster.rank_place import RankPlace
from deploy.actors.expert_worker import LoadedRank
from deploy.ray_head import RayHead
from deploy.ray_ranks import RayRanks

GOES_ON, HAS_ENDED, HAS_FAILED = (False, None), (True, None), (False, "its process died")


def ranks_that_serve(*results: tuple[bool, Any], pid: int = 0) -> RayRanks:
    """One per result of their endless calls, all of them this process on this host."""
    head = RayHead(ClusterSection(), ask=lambda _: True)
    ranks = RayRanks(
        lambda rank: None,
        ("", ""),
        1.0,
        engine_life=lambda: 0,
        head=head,
        result=lambda call: results[int(call)],
    )
    place = RankPlace(ray.util.get_node_ip_address(), "cpu")
    for rank in range(len(results)):
        ranks.calls[rank] = rank
        ranks.loaded[rank] = LoadedRank(pid, place, "a")
    return ranks


def test_ranks_whose_endless_call_goes_on_serve() -> None:
    ranks = ranks_that_serve(GOES_ON, HAS_ENDED, HAS_FAILED, GOES_ON)
    assert ranks.serving() == [0, 3]


def test_a_rank_that_is_stopped_is_killed_with_the_cell() -> None:
    process = subprocess.Popen(["sleep", "30"])
    os.kill(process.pid, signal.SIGSTOP)
    ranks = ranks_that_serve(GOES_ON, pid=process.pid)
    ranks.kill_processes(ranks.serving(), 1.0)
    assert process.wait(timeout=10) == -signal.SIGKILL
