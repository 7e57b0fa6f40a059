"""`python -m tests.chaos`: 32 greedy streams, and processes of the cell killed, frozen or starved among them at seeded
moments.

Every stream has to give the tokens of an undisturbed run. Those of a killed HTTP server may end in one broken
connection; what they gave until then has to be its beginning. Each disturbance finds an empty prefix store.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.disturbances import KINDS, Kind, await_moment, drawn_kinds
from tests.chaos.document import write_section
from tests.chaos.outcomes import Outcome, recoveries, table, wrong_streams
from tests.chaos.scene import RANKS_MEET, Scene
from tests.chaos.streams import Stream, Streams, longest_pause
from tests.helpers.served import Served, eventually
from tests.integration.api import CellApi
from tests.integration.open_requests import health

ENOUGH = 0.95
"""Of all streams have to go on to their end."""
NUM_HTTP_SERVERS = 4
LATE_LINES_SECONDS = 10.0
"""Ray brings the engine's lines a moment later."""
# What is given back to the allocator goes back to the kernel, so that a process that gets no more memory feels it.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 * 2**10),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**10),
}


@dataclass(frozen=True)
class Undisturbed:
    """seconds: in all; prompt_seconds: until every stream had begun."""

    streams: list[Stream]
    seconds: float
    prompt_seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when no stream was wrong and enough went on to their end."""
    options = _parse(arguments)
    kinds = tuple(kind for kind in KINDS if options.only in kind.name)
    drawn = drawn_kinds(options.seed, options.disturbances, kinds)
    flags = ["--ep-size", str(options.ep_size), "--http-servers", str(NUM_HTTP_SERVERS)]
    flags += ["--set", "cell.step_timeout_floor_seconds=4", "--set", "cell.step_timeout_factor=10"]
    flags += ["--set", "http.access_log=false", "--deterministic"]
    began = time.monotonic()
    with Served(*flags, environment=ENVIRONMENT) as served:
        served.wait_until_ready(seconds=330.0)
        undisturbed = _undisturbed(served, options)
        outcomes: list[Outcome] = []
        try:
            for number, kind in enumerate(drawn):
                if time.monotonic() > began + 60.0 * options.minutes:
                    break
                draw = random.Random(f"{options.seed} {number}")
                outcomes.append(_disturb(served, kind, draw, undisturbed, options))
                print(f"{number + 1}: {outcomes[-1]}", file=sys.stderr, flush=True)
        except BaseException:
            print("\n".join(table(outcomes)), file=sys.stderr)
            raise
    about = _about(options, len(outcomes), undisturbed, time.monotonic() - began)
    lines = [about, "", *table(outcomes)]
    print("\n".join(lines))
    if options.out is not None:
        write_section(options.out, "On one host", lines)
    num_streams = sum(outcome.num_streams for outcome in outcomes)
    enough = sum(outcome.num_whole for outcome in outcomes) >= ENOUGH * num_streams
    return 0 if enough and not any(outcome.num_wrong for outcome in outcomes) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--disturbances", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=20.0, help="after these none begins")
    parser.add_argument("--ep-size", type=int, default=4)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--out", type=Path, help="a document whose section is replaced")
    return parser.parse_args(arguments)


def _undisturbed(served: Served, options: argparse.Namespace) -> Undisturbed:
    """The second of two runs: what is slow the first time is over then."""
    runs = []
    for _ in range(2):
        _evict(served)
        began = time.monotonic()
        ends = Streams(served.base_url, options.streams, options.max_tokens).ends()
        assert all(stream.is_whole for stream in ends), ends
        begun = max(stream.token_times[0] for stream in ends)
        runs.append(Undisturbed(ends, time.monotonic() - began, begun - began))
    assert [s.token_ids for s in runs[0].streams] == [s.token_ids for s in runs[1].streams]
    return runs[1]


def _disturb(
    served: Served,
    kind: Kind,
    draw: random.Random,
    undisturbed: Undisturbed,
    options: argparse.Namespace,
) -> Outcome:
    _evict(served)
    streams = Streams(served.base_url, options.streams, options.max_tokens)
    scene = Scene(served, streams, draw, ep_size=options.ep_size)
    await_moment(scene, kind.moment, undisturbed.prompt_seconds)
    num_open, at = streams.num_open, time.monotonic()
    kind.do(scene)
    ends = streams.ends()
    has_hit = _await_rest(scene, kind)
    seconds, num_routed, num_unrouted = recoveries(scene.told())
    wrong = wrong_streams(ends, undisturbed.streams, may_be_cut=kind.loses_streams)
    for end in wrong[:3]:
        print(f"wrong: {end}", file=sys.stderr)
    return Outcome(
        kind.name if has_hit else f"{kind.name} (missed its moment)",
        num_open=num_open,
        num_whole=sum(end.is_whole for end in ends),
        num_cut=sum(not end.is_whole for end in ends),
        num_wrong=len(wrong),
        pause_seconds=longest_pause(ends, at),
        seconds=seconds,
        num_routed=num_routed,
        num_unrouted=num_unrouted,
    )


def _await_rest(scene: Scene, kind: Kind) -> bool:
    """Until the cell is whole again, idle, and has said so. Whether the ranks have met as often as they had to."""
    served = scene.served
    eventually(lambda: health(served).status_code == 200, 120.0, "a cell that is ready again")
    eventually(
        lambda: len(served.pids_of("HttpServer")) == NUM_HTTP_SERVERS, 60.0, "all HTTP servers"
    )
    with CellApi(served.base_url, served.admin_url) as api:
        api.is_idle()
    num_groups = scene.told().count(RANKS_MEET)
    if num_groups:
        eventually(lambda: recoveries(scene.told())[0], LATE_LINES_SECONDS, "a recovery's line")
    return num_groups >= kind.num_groups


def _evict(served: Served) -> None:
    with CellApi(served.base_url, served.admin_url) as api:
        api.evict("all")


def _about(
    options: argparse.Namespace, number: int, undisturbed: Undisturbed, seconds: float
) -> str:
    return (
        f"Written by `python -m tests.chaos --disturbances {options.disturbances} --ep-size {options.ep_size} --seed "
        f"{options.seed} --out docs/chaos.md`: EP {options.ep_size} on one host of two cores, {NUM_HTTP_SERVERS} HTTP "
        f"servers, {options.streams} greedy streams of {options.max_tokens} tokens at a time "
        f"({undisturbed.seconds:.0f} s undisturbed), deterministic numerics; {number} disturbances in "
        f"{seconds / 60:.0f} minutes, with a load average of {os.getloadavg()[2]:.0f} (others worked on the machine, "
        "too). Every stream was compared token by token with an undisturbed run, and after each disturbance the cell "
        "had to be ready, with all HTTP servers, no request and no lease left."
    )


if __name__ == "__main__":
    sys.exit(main())
