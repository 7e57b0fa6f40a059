"""`python -m tests.chaos.on_hosts` (root): four hosts with a rank each and a spare one; ranks, hosts and their network
fail among greedy streams, at seeded moments, and every stream has to give the tokens of an undisturbed run.
"""

import argparse
import os
import random
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from tests.chaos.document import write_section
from tests.chaos.draws import drawn_kinds, outcomes_of
from tests.chaos.host_disturbances import KINDS, HostKind, HostScene
from tests.chaos.outcomes import Observed, Outcome, is_good, num_hits, outcome_of, table
from tests.chaos.scene import told_recoveries
from tests.chaos.streams import Stream, Streams
from tests.helpers.hosts.fleet import fleet_of
from tests.helpers.hosts.ray_on_hosts import RayOnHosts
from tests.helpers.hosts.served_on_hosts import ServedOnHosts
from tests.helpers.served import eventually

COMMAND = "python", "-m", "tests.chaos.on_hosts"
NUM_RANKS = 4
READY_SECONDS = 240.0
REST_SECONDS = 120.0
HEADING = "On four hosts"


@dataclass(frozen=True)
class HostChaos:
    """How much of it."""

    kinds: tuple[HostKind, ...]
    seed: int = 1
    num_streams: int = 32
    max_tokens: int = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every stream went on to its end with the right tokens."""
    parser = argparse.ArgumentParser(prog=" ".join(COMMAND))
    parser.add_argument("--disturbances", type=int, default=10)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--out", type=Path, help="a document whose section is replaced")
    given = sys.argv[1:] if arguments is None else arguments
    options, command = parser.parse_args(given), shlex.join([*COMMAND, *given])
    among = tuple(kind for kind in KINDS if options.only in kind.name)
    kinds = drawn_kinds(options.seed, options.disturbances, among)
    chaos = HostChaos(tuple(kinds), options.seed, options.streams, options.max_tokens)
    began, load_before = time.monotonic(), os.getloadavg()[0]
    outcomes: list[Outcome] = []
    try:
        for outcome in run(chaos):
            outcomes.append(outcome)
    except BaseException:
        print("\n".join(table(outcomes)), file=sys.stderr)
        raise
    minutes = (time.monotonic() - began) / 60
    lines = [
        f"Written by `{command}`: {_about(chaos)} {num_hits(outcomes)} of {options.disturbances} disturbances in "
        f"{minutes:.0f} minutes; the machine had a load average of {load_before:.1f} before.",
        "",
        *table(outcomes),
    ]
    print("\n".join(lines))
    if options.out is not None:
        write_section(options.out, HEADING, lines)
    return 0 if is_good(outcomes) else 1


def run(chaos: HostChaos) -> Iterator[Outcome]:
    """Raises AssertionError when the cell does not come to rest after a disturbance."""
    with scene_on_hosts(chaos) as scene:
        undisturbed = _undisturbed(scene, chaos)

        def disturb(kind: HostKind, draw: random.Random) -> Outcome:
            return _disturb(replace(scene, draw=draw, repairs=[]), kind, undisturbed, chaos)

        yield from outcomes_of(chaos.kinds, disturb, seed=chaos.seed, seconds=inf)
        assert scene.served.stop(60.0) == 0


@contextmanager
def scene_on_hosts(chaos: HostChaos) -> Iterator[HostScene]:
    with fleet_of(NUM_RANKS + 1) as fleet:
        ray = RayOnHosts(fleet, fleet.hosts, ranks_per_host=1)
        ray.start()
        flags = [
            *("--ep-size", str(NUM_RANKS), "--deterministic"),
            *("--num-kv-blocks", "512", "--max-model-len", "1024"),
            *("--set", f"cluster.num_hosts={NUM_RANKS + 1}", "--set", "http.access_log=false"),
            *("--set", "cell.step_timeout_floor_seconds=4", "--set", "cell.step_timeout_factor=10"),
        ]
        with ServedOnHosts(fleet.hosts, fleet.directory, *flags) as served:
            served.wait_until_ready(READY_SECONDS)
            yield HostScene(fleet.hosts, ray, served, random.Random(chaos.seed))


def _undisturbed(scene: HostScene, chaos: HostChaos) -> list[Stream]:
    ends = Streams(scene.served.base_url, chaos.num_streams, chaos.max_tokens).ends()
    assert all(stream.is_whole for stream in ends), ends
    return ends


def _disturb(
    scene: HostScene, kind: HostKind, undisturbed: list[Stream], chaos: HostChaos
) -> Outcome:
    served, draw = scene.served, scene.draw
    kind.prepare(scene)
    served.evict_all()
    offset = served.stderr_bytes
    streams = Streams(served.base_url, chaos.num_streams, chaos.max_tokens)
    share = draw.uniform(0.02, 0.5)
    eventually(lambda: streams.share_of_tokens >= share, REST_SECONDS, f"{share:.0%} of tokens")
    num_open, at = streams.num_open, time.monotonic()
    kind.do(scene)
    ends = streams.ends()
    for repair in scene.repairs:
        repair()
    eventually(lambda: served.is_healthy, REST_SECONDS, "a cell that is ready again")
    eventually(lambda: _is_idle(served), REST_SECONDS, "an idle cell without leases")
    told = told_recoveries(lambda: served.stderr_from(offset))
    seen = Observed(kind.name, ends, num_open, at, told, kind.num_groups)
    return outcome_of(seen, undisturbed)


def _is_idle(served: ServedOnHosts) -> bool:
    status = served.status()
    return not (status["num_running"] or status["num_waiting"] or status["kv_blocks_leased"])


def _about(chaos: HostChaos) -> str:
    return (
        f"EP {NUM_RANKS}, a rank on each of four hosts (namespaces with an sshd each on one machine of "
        f"{os.cpu_count()} cores) and a spare host, {chaos.num_streams} greedy streams of {chaos.max_tokens} tokens at "
        "a time, deterministic numerics, `cell.step_timeout_floor_seconds` 4 instead of 20 (a silent host is found so "
        "much sooner), Ray's patience as in `deploy/ray/local.yaml`. Engine and HTTP server are on the first host, "
        "which keeps its power and its network. Every stream was compared token by token with an undisturbed run. "
        "After each disturbance the cell had to be ready and without leases, and the processes of ranks that were "
        "replaced had to be gone."
    )


if __name__ == "__main__":
    sys.exit(main())
