"""`python -m tests.chaos`: 32 greedy streams, and processes of the cell killed or frozen among them at seeded moments.

Every stream has to give the tokens of an undisturbed run. Those of a killed HTTP server may end in one broken
connection; what they gave until then has to be its beginning. Each disturbance finds an empty prefix store.
"""

import argparse
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.chaos.disturbances import Kind, drawn_kinds
from tests.chaos.streams import Stream, Streams
from tests.helpers.served import Served, eventually
from tests.integration.api import CellApi
from tests.integration.open_requests import health

RECOVERED = re.compile(
    r"recovered generation=\d+ seconds=([\d.]+) new_ranks=\[.*?\] requests=\d+ "
    r"routed_tokens=(\d+) unrouted_tokens=(\d+)"
)


@dataclass(frozen=True)
class Outcome:
    """Of one disturbance. seconds: of each recovery that it took; tokens: of requests that were placed anew."""

    kind: Kind
    num_whole: int
    num_lost: int
    num_wrong: int
    seconds: tuple[float, ...]
    num_routed: int
    num_unrouted: int


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when no stream was wrong and at least 95 % went on to their end."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--disturbances", type=int, default=40)
    parser.add_argument("--ep-size", type=int, default=4)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    flags = ["--ep-size", str(options.ep_size), "--http-servers", "2", "--deterministic"]
    flags += ["--set", "cell.step_timeout_floor_seconds=4", "--set", "cell.step_timeout_factor=10"]
    with Served(*flags) as served:
        served.wait_until_ready(seconds=330.0)
        undisturbed = Streams(served, options.streams, options.max_tokens).ends()
        assert all(stream.is_whole for stream in undisturbed)
        outcomes = []
        for number, kind in enumerate(drawn_kinds(options.seed, options.disturbances)):
            draw = random.Random(f"{options.seed} {number}")
            outcomes.append(_disturb(served, kind, draw, undisturbed, options))
            print(f"{number + 1}: {outcomes[-1]}", file=sys.stderr, flush=True)
    table = "\n".join(_lines(outcomes, options))
    print(table)
    if options.out is not None:
        options.out.write_text(table + "\n")
    num_whole = sum(outcome.num_whole for outcome in outcomes)
    enough = num_whole >= 0.95 * options.streams * len(outcomes)
    return 0 if enough and not any(outcome.num_wrong for outcome in outcomes) else 1


def _disturb(
    served: Served,
    kind: Kind,
    draw: random.Random,
    undisturbed: list[Stream],
    options: argparse.Namespace,
) -> Outcome:
    with CellApi(served.base_url, served.admin_url) as api:
        api.evict("all")
    told = len(served.stderr)
    streams = Streams(served, options.streams, options.max_tokens)
    time.sleep(draw.uniform(*kind.delays))
    kind.do(served, draw, options.ep_size)
    ends = streams.ends()
    eventually(lambda: health(served).status_code == 200, 120.0, "a cell that is ready again")
    eventually(lambda: len(served.pids_of("HttpServer")) == 2, 60.0, "both HTTP servers")
    found = [match.groups() for match in RECOVERED.finditer(served.stderr[told:])]
    wrong = [
        end
        for end, expected in zip(ends, undisturbed, strict=True)
        if not _is_right(end, expected, kind)
    ]
    for end in wrong[:3]:
        print(f"wrong: {end}", file=sys.stderr)
    return Outcome(
        kind,
        num_whole=sum(end.is_whole for end in ends),
        num_lost=sum(not end.is_whole for end in ends),
        num_wrong=len(wrong),
        seconds=tuple(float(seconds) for seconds, _, _ in found),
        num_routed=sum(int(routed) for _, routed, _ in found),
        num_unrouted=sum(int(unrouted) for _, _, unrouted in found),
    )


def _is_right(end: Stream, expected: Stream, kind: Kind) -> bool:
    if end.is_whole:
        return end.token_ids == expected.token_ids
    is_beginning = end.token_ids == expected.token_ids[: len(end.token_ids)]
    return kind.loses_streams and is_beginning


def _lines(outcomes: list[Outcome], options: argparse.Namespace) -> list[str]:
    lines = [
        "# Killed and frozen processes",
        "",
        f"Written by `python -m tests.chaos --disturbances {options.disturbances} --ep-size {options.ep_size} "
        f"--seed {options.seed} --out docs/chaos.md`: EP {options.ep_size} on one host of two cores, two HTTP servers, "
        f"{options.streams} greedy streams of {options.max_tokens} tokens at a time, deterministic numerics. Every "
        "stream was compared token by token with an undisturbed run. *Recovery* is from the break to the next step, "
        "*replayed* the share of the known tokens of moved requests that had their routes.",
        "",
        "| what | times | streams to their end | cut off | wrong | recovery p50, s | max, s | replayed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.kind == kind]
        seconds = [s for outcome in mine for s in outcome.seconds]
        routed = sum(outcome.num_routed for outcome in mine)
        known = routed + sum(outcome.num_unrouted for outcome in mine)
        cells = [
            kind.name,
            str(len(mine)),
            str(sum(outcome.num_whole for outcome in mine)),
            str(sum(outcome.num_lost for outcome in mine)),
            str(sum(outcome.num_wrong for outcome in mine)),
            f"{median(seconds):.1f}" if seconds else "",
            f"{max(seconds):.1f}" if seconds else "",
            f"{routed / known:.0%}" if known else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
