"""`python -m tests.chaos.on_hosts` (root): four hosts with a rank each and a spare one; ranks, hosts and their network
fail among greedy streams, at seeded moments, and every stream has to give the tokens of an undisturbed run.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos.document import write_section
from tests.chaos.host_disturbances import KINDS, HostKind, HostScene
from tests.chaos.outcomes import Outcome, recoveries, table, wrong_streams
from tests.chaos.streams import Stream, Streams, longest_pause
from tests.helpers.hosts.fleet import fleet_of
from tests.helpers.hosts.ray_on_hosts import RayOnHosts
from tests.helpers.hosts.served_on_hosts import ServedOnHosts
from tests.helpers.served import eventually

NUM_RANKS = 4
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
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.on_hosts")
    parser.add_argument("--disturbances", type=int, default=10)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--out", type=Path, help="a document whose section is replaced")
    options = parser.parse_args(arguments)
    among = tuple(kind for kind in KINDS if options.only in kind.name)
    kinds = drawn_kinds(options.seed, options.disturbances, among)
    chaos = HostChaos(kinds, options.seed, options.streams, options.max_tokens)
    began = time.monotonic()
    outcomes = run(chaos)
    lines = [_about(chaos, time.monotonic() - began), "", *table(outcomes)]
    print("\n".join(lines))
    if options.out is not None:
        write_section(options.out, HEADING, lines)
    return 0 if all(is_good(outcome) for outcome in outcomes) else 1


def is_good(outcome: Outcome) -> bool:
    return not outcome.num_wrong and not outcome.num_cut


def drawn_kinds(seed: int, number: int, among: tuple[HostKind, ...]) -> tuple[HostKind, ...]:
    """Every kind as often as the others, or once more, in a drawn order."""
    drawn = [among[n % len(among)] for n in range(number)]
    random.Random(seed).shuffle(drawn)
    return tuple(drawn)


def run(chaos: HostChaos) -> list[Outcome]:
    """Raises AssertionError when the cell does not come to rest after a disturbance."""
    with scene_on_hosts(chaos) as scene:
        undisturbed = _undisturbed(scene, chaos)
        outcomes = []
        for number, kind in enumerate(chaos.kinds):
            scene = replace(scene, draw=random.Random(f"{chaos.seed} {number}"), repairs=[])
            outcomes.append(_disturb(scene, kind, undisturbed, chaos))
            print(f"{number + 1}: {outcomes[-1]}", file=sys.stderr, flush=True)
        assert scene.served.stop(60.0) == 0
        return outcomes


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
            served.wait_until_ready()
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
    told = len(served.stderr)
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
    seconds, num_routed, num_unrouted = recoveries(served.stderr[told:])
    wrong = wrong_streams(ends, undisturbed, may_be_cut=False)
    for end in wrong[:3]:
        print(f"wrong: {end}", file=sys.stderr)
    return Outcome(
        kind.name,
        num_open=num_open,
        num_whole=sum(end.is_whole for end in ends),
        num_cut=sum(not end.is_whole for end in ends),
        num_wrong=len(wrong),
        pause_seconds=longest_pause(ends, at),
        seconds=seconds,
        num_routed=num_routed,
        num_unrouted=num_unrouted,
    )


def _is_idle(served: ServedOnHosts) -> bool:
    status = served.status()
    return not (status["num_running"] or status["num_waiting"] or status["kv_blocks_leased"])


def _about(chaos: HostChaos, seconds: float) -> str:
    return (
        f"Written by `python -m tests.chaos.on_hosts --disturbances {len(chaos.kinds)} --seed {chaos.seed} --out "
        f"docs/chaos.md`: EP {NUM_RANKS}, a rank on each of four hosts (namespaces with an sshd each on one machine of "
        f"two cores) and a spare host, {chaos.num_streams} greedy streams of {chaos.max_tokens} tokens at a time, "
        "deterministic numerics, `cell.step_timeout_floor_seconds` 4 instead of 20 (a silent host is found so much "
        f"sooner), Ray's patience as in `deploy/ray/local.yaml`; {seconds / 60:.0f} minutes in all. Engine and HTTP "
        "server are on the first host, which keeps its power and its network. Every stream was compared token by token "
        "with an undisturbed run. "
        "After each disturbance the cell had to be ready and without leases, and the processes of ranks that were "
        "replaced had to be gone."
    )


if __name__ == "__main__":
    sys.exit(main())
