"""`python -m tests.chaos`: 32 greedy streams, and processes of the cell killed, frozen or starved among them at seeded
moments.

Every stream has to give the tokens of an undisturbed run. Those connected to a killed HTTP server, and no others, may
end in one error; what they gave until then has to be its beginning. Each disturbance finds an empty prefix store.
"""

import argparse
import os
import random
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.disturbances import KINDS, Kind, await_moment
from tests.chaos.document import write_section
from tests.chaos.draws import drawn_kinds, outcomes_of
from tests.chaos.outcomes import Observed, Outcome, is_good, num_hits, outcome_of, table
from tests.chaos.scene import Scene, told_recoveries
from tests.chaos.streams import Stream, Streams
from tests.helpers.served import Served, eventually
from tests.integration.api import CellApi
from tests.integration.open_requests import health

COMMAND = "python", "-m", "tests.chaos"
NUM_HTTP_SERVERS = 4
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
    given = sys.argv[1:] if arguments is None else arguments
    options, command = _parse(given), shlex.join([*COMMAND, *given])
    began, load_before = time.monotonic(), os.getloadavg()[0]
    outcomes: list[Outcome] = []
    try:
        undisturbed = _run(options, outcomes)
    except BaseException:
        print("\n".join(table(outcomes)), file=sys.stderr)
        raise
    minutes = (time.monotonic() - began) / 60
    lines = [
        f"Written by `{command}`: {_about(options, undisturbed)} {num_hits(outcomes)} of {options.disturbances} "
        f"disturbances in {minutes:.0f} minutes on {os.cpu_count()} cores, which had a load average of "
        f"{load_before:.1f} before.",
        "",
        *table(outcomes),
    ]
    print("\n".join(lines))
    if options.out is not None:
        write_section(options.out, "On one host", lines)
    return 0 if is_good(outcomes) else 1


def _run(options: argparse.Namespace, outcomes: list[Outcome]) -> Undisturbed:
    """Adds to `outcomes` as they come."""
    kinds = tuple(kind for kind in KINDS if options.only in kind.name)
    drawn = drawn_kinds(options.seed, options.disturbances, kinds)
    flags = ["--ep-size", str(options.ep_size), "--http-servers", str(NUM_HTTP_SERVERS)]
    flags += ["--set", "cell.step_timeout_floor_seconds=4", "--set", "cell.step_timeout_factor=10"]
    flags += ["--set", "http.access_log=false", "--deterministic"]
    with (
        TemporaryDirectory() as state,
        Served(*flags, "--state-dir", state, environment=ENVIRONMENT) as served,
    ):
        served.wait_until_ready(seconds=330.0)
        undisturbed = _undisturbed(served, options)

        def disturb(kind: Kind, draw: random.Random) -> Outcome:
            return _disturb(served, kind, draw, undisturbed, options)

        seconds = 60.0 * options.minutes
        for outcome in outcomes_of(drawn, disturb, seed=options.seed, seconds=seconds):
            outcomes.append(outcome)
    return undisturbed


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=" ".join(COMMAND))
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
    _await_rest(served)
    told = told_recoveries(scene.told)
    wanted = kind.num_groups, kind.num_starts
    seen = Observed(kind.name, ends, num_open, at, told, *wanted, scene.lost_clients)
    return outcome_of(seen, undisturbed.streams)


def _await_rest(served: Served) -> None:
    """Until the cell is whole again, and idle."""
    eventually(lambda: health(served).status_code == 200, 120.0, "a cell that is ready again")
    eventually(
        lambda: len(served.pids_of("HttpServer")) == NUM_HTTP_SERVERS, 60.0, "all HTTP servers"
    )
    with CellApi(served.base_url, served.admin_url) as api:
        api.is_idle()


def _evict(served: Served) -> None:
    with CellApi(served.base_url, served.admin_url) as api:
        api.evict("all")


def _about(options: argparse.Namespace, undisturbed: Undisturbed) -> str:
    return (
        f"EP {options.ep_size} on one host, {NUM_HTTP_SERVERS} HTTP servers, {options.streams} greedy streams of "
        f"{options.max_tokens} tokens at a time ({undisturbed.seconds:.0f} s undisturbed), deterministic numerics, "
        "routes on disk (`--state-dir`). Every stream was compared token by token with an undisturbed run, and after "
        "each disturbance the cell had to be ready, with all HTTP servers, no request and no lease left."
    )


if __name__ == "__main__":
    sys.exit(main())
