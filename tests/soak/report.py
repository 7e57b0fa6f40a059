"""A soak as a page: series over time with their trends, what was asked and done, and the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tests.soak.clients import Tally
from tests.soak.verdict import Sample, Trend

NUM_COLUMNS = 10
OUTCOMES = ("answered", "left", "refused", "ended by new weights", "sent away", "failed")


@dataclass(frozen=True)
class Run:
    """`problems` is empty when all is well."""

    command: str
    about: str
    samples: Sequence[Sample]
    trends: Sequence[Trend]
    warm_up_seconds: float
    tally: Tally
    done: Mapping[str, int]
    probes: str
    end: Sequence[str]
    problems: Sequence[str]


def lines_of(run: Run) -> list[str]:
    return [
        "# Half an hour of everything",
        "",
        f"Written by `{run.command}`. {run.about}",
        "",
        *_verdict(run),
        "",
        "## Over time",
        "",
        "Medians of equal parts of the run. *Slope* is Theil and Sen's of all samples after the warm-up of "
        f"{run.warm_up_seconds / 60:.0f} minutes, *halves* those of least squares of the first and the second half of "
        "them, all per ten minutes. A series grows if all three are above its limit. USS is memory that no other "
        "process shares. Several processes of Ray's own with one name are added up.",
        "",
        *_series(run),
        "",
        "## What was asked",
        "",
        *_outcomes(run.tally),
        "",
        "## What was done beside it",
        "",
        *(f"- {what}: {number}" for what, number in sorted(run.done.items())),
        f"- {run.probes}",
        "",
        "## At the end",
        "",
        *(f"- {line}" for line in run.end),
    ]


def _verdict(run: Run) -> list[str]:
    if not run.problems:
        return ["**Nothing grows.**"]
    return ["**Not well:**", "", *(f"- {problem}" for problem in run.problems)]


def _series(run: Run) -> list[str]:
    parts = _parts(run.samples)
    minutes = [f"{part[-1].seconds / 60:.0f}" for part in parts]
    lines = [
        f"| series, at minute | {' | '.join(minutes)} | slope | halves | limit |",
        f"| --- |{' --- |' * (len(parts) + 3)}",
    ]
    for trend in run.trends:
        levels = [_level(part, trend.name) for part in parts]
        limit = "" if trend.limit is None else f"{trend.limit:g}"
        first, second = trend.halves
        rises = f"{trend.slope:+.2f} | {first:+.2f}, {second:+.2f} | {limit}"
        mark = "**" if trend.grows else ""
        lines.append(f"| {mark}{trend.name}{mark} | {' | '.join(levels)} | {rises} |")
    return lines


def _parts(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    number = min(NUM_COLUMNS, len(samples))
    borders = [len(samples) * n // number for n in range(number + 1)]
    return [samples[start:end] for start, end in pairwise(borders)]


def _level(part: Sequence[Sample], name: str) -> str:
    values = [sample.values[name] for sample in part if name in sample.values]
    if not values:
        return ""
    level = median(values)
    return f"{level:.1f}" if level != int(level) and abs(level) < 1000 else f"{level:.0f}"


def _outcomes(tally: Tally) -> list[str]:
    table = tally.table()
    lines = [f"| what | {' | '.join(OUTCOMES)} |", f"| --- |{' --- |' * len(OUTCOMES)}"]
    for kind in sorted(table):
        counts = [str(table[kind][outcome] or "") for outcome in OUTCOMES]
        lines.append(f"| {kind} | {' | '.join(counts)} |")
    totals = [str(tally.of(outcome)) for outcome in OUTCOMES]
    return [*lines, f"| all | {' | '.join(totals)} |"]
