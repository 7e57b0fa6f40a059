"""The whole product of models, EP sizes, states, chunk sizes and prompt lengths against a cold run and transformers.

Run as `python -m tests.oracle_matrix --out docs/oracle/whole.md`; the table is written after every cell, so that a
run that is ended early leaves what it has shown. With `--keep DIRECTORY` the next one goes on from there, as long as
no line of the code under test has changed; several can share the directory, each with its own models or EP sizes.
"""

import argparse
import hashlib
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec
import torch
import transformers

from cluster.errors import PointsmanError
from tests.helpers.equality import (
    ARGMAX_GAP,
    LISTED_SHARE,
    LOGIT_TOLERANCE,
    ROUTE_MARGIN,
    Comparison,
)
from tests.helpers.laboratory import DEMO, MAX_TOKENS, MODELS, Case, Laboratory
from tests.helpers.states import AGAIN_STATES, PLANNED_STATES, STATES, State

AnyState = State | Literal["injected"]
ALL_STATES: tuple[AnyState, ...] = (*STATES, "injected")
BUDGETS = (512, 16, 7, 1)
FAST_BUDGETS = (512, 16)
SHORT_LENGTHS = (1, 15, 16, 17, 31, 32, 33)
BLOCK_BORDER_LENGTHS = (255, 256, 257)
LONG_LENGTHS = (1000, 1999, 2000)
LONG_IN_SMALL_CHUNKS = (DEMO, "plain")
"""Only these models run long prompts in chunks of 1 and 7: 2,000 steps each, many times over."""
LONG_AT_EP, BORDERS_AT_EP = 4, 8
"""With more ranks only one chunk size runs long prompts, and token by token only short ones run: a step takes every
rank's turn on the cores there are."""
SHOWN_DETAILS = 40
CODE_UNDER_TEST = ("cluster", "expert_workers", "prefix_store", "router_service", "tests/helpers")


@dataclass(frozen=True)
class Part:
    """What of the product is run."""

    models: tuple[str, ...] = MODELS
    ep_sizes: tuple[int, ...] = (1, 2, 4)
    budgets: tuple[int, ...] = BUDGETS
    lengths: tuple[int, ...] = SHORT_LENGTHS + BLOCK_BORDER_LENGTHS + LONG_LENGTHS
    states: tuple[AnyState, ...] = ALL_STATES


QUICK = Part((DEMO, "plain", "odd_sizes"), (1, 2), (512, 7), (*SHORT_LENGTHS, 257))


@dataclass
class Line:
    """One line of the table: all prompt lengths of a model, EP size, numerics, state and chunk size."""

    model: str
    ep_size: int
    numerics: str
    state: str
    budget: int
    num_runs: int = 0
    compared: Comparison = field(default_factory=Comparison)
    byte_differences: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        return [*self.byte_differences, *self.compared.failures]

    @property
    def name(self) -> str:
        return (
            f"{self.model}, EP {self.ep_size}, {self.numerics}, {self.state}, chunk {self.budget}"
        )

    def cells(self) -> str:
        values = (
            self.model,
            self.ep_size,
            self.numerics,
            self.state,
            self.budget,
            self.num_runs,
            f"{self.compared.decisions:,}",
            len(self.compared.listed),
            f"{self.compared.max_logit_difference:.1e}",
            len(self.failures),
        )
        return f"| {' | '.join(map(str, values))} |"


def cases_of(part: Part) -> list[Case]:
    """Cells outermost; the states of one engine together."""
    return [
        Case(model, ep_size, state, budget, lengths, deterministic)
        for ep_size in part.ep_sizes
        for model in part.models
        for deterministic in (True, False)
        for budget in part.budgets
        if deterministic or budget in FAST_BUDGETS
        for lengths in _batches(part, model, ep_size, budget)
        for state in part.states
    ]


def _batches(part: Part, model: str, ep_size: int, budget: int) -> Iterator[tuple[int, ...]]:
    """Lengths that are run together, at most a batch of eight."""
    smallest_for_long = BUDGETS[-1] if model in LONG_IN_SMALL_CHUNKS else 16
    if ep_size > LONG_AT_EP:
        smallest_for_long = BUDGETS[0]
    for group in (SHORT_LENGTHS, BLOCK_BORDER_LENGTHS, LONG_LENGTHS):
        lengths = tuple(length for length in group if length in part.lengths)
        if group is LONG_LENGTHS and budget < smallest_for_long:
            continue
        if group is not SHORT_LENGTHS and budget == 1 and ep_size > BORDERS_AT_EP:
            continue
        if lengths:
            yield lengths


@dataclass
class CellResult:
    """Of a model, EP size and numerics; `code`: digest of the code that gave it, `seconds` it took."""

    code: str
    seconds: float
    num_cases: int
    lines: list[Line]


class Kept:
    """Results of earlier runs of the same code, a file for each cell and part of the product."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._code = _digest_of_code()

    def load(self, cases: Sequence[Case]) -> CellResult | None:
        path = self._path(cases)
        if path is None or not path.exists():
            return None
        result = msgspec.json.decode(path.read_bytes(), type=CellResult)
        return result if result.code == self._code else None

    def save(self, cases: Sequence[Case], lines: list[Line], seconds: float) -> CellResult:
        result = CellResult(self._code, seconds, len(cases), lines)
        if path := self._path(cases):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(result))
        return result

    def _path(self, cases: Sequence[Case]) -> Path | None:
        """Named by what was run, so that a result of a smaller part is never taken for one of the whole."""
        digest = hashlib.sha256("\n".join(map(str, cases)).encode()).hexdigest()[:12]
        case = cases[0]
        name = f"{case.model}-ep{case.ep_size}-{digest}.json"
        return self._directory / name if self._directory else None


def _digest_of_code() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(p for folder in CODE_UNDER_TEST for p in (root / folder).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def run(part: Part, out: Path, command: str, kept: Kept) -> list[Line]:
    """All lines; writes `out` after every cell and says on stderr how far it is."""
    cases = cases_of(part)
    results: list[CellResult] = []
    with tempfile.TemporaryDirectory() as directory:
        laboratory = Laboratory(Path(directory))
        for cell, group in groupby(cases, key=lambda c: (c.model, c.ep_size, c.deterministic)):
            cell_cases = list(group)
            results.append(kept.load(cell_cases) or _run_cell(laboratory, cell_cases, kept))
            lines = [line for result in results for line in result.lines]
            progress = Progress(
                sum(result.num_cases for result in results),
                len(cases),
                sum(result.seconds for result in results),
            )
            out.write_text(report(lines, part, command, progress), encoding="utf-8")
            failures = sum(len(line.failures) for line in lines)
            print(f"{progress} cell={cell} failures={failures}", file=sys.stderr, flush=True)
        laboratory.close()
    return [line for result in results for line in result.lines]


def _run_cell(laboratory: Laboratory, cases: Sequence[Case], kept: Kept) -> CellResult:
    started = time.monotonic()
    lines: dict[tuple[object, ...], Line] = {}
    for case in cases:
        _add(laboratory, case, lines)
    return kept.save(cases, list(lines.values()), time.monotonic() - started)


def _add(laboratory: Laboratory, case: Case, lines: dict[tuple[object, ...], Line]) -> None:
    numerics = "deterministic" if case.deterministic else "fast"
    key = case.model, case.ep_size, numerics, case.state, case.budget
    line = lines.setdefault(key, Line(*key))
    try:
        outcome = laboratory.outcome_in_passing(case)
    except (PointsmanError, AssertionError) as error:
        line.compared += Comparison(failures=(f"{case}: not run: {error}",))
        laboratory.close()
        return
    line.num_runs += outcome.num_runs
    line.compared += outcome.comparison
    line.byte_differences += outcome.byte_differences


@dataclass(frozen=True)
class Progress:
    num_done: int
    num_cases: int
    seconds: float

    def __str__(self) -> str:
        return f"cases={self.num_done}/{self.num_cases} minutes={self.seconds / 60:.1f}"


def report(lines: Sequence[Line], part: Part, command: str, progress: Progress) -> str:
    total = sum((line.compared for line in lines), Comparison())
    failures = [f"{line.name}: {what}" for line in lines for what in line.failures]
    listed = [f"{line.name}: {what}" for line in lines for what in line.compared.listed]
    share = len(listed) / max(1, total.decisions)
    return "\n".join(
        [
            "# What was compared with what",
            "",
            f"Written by `{command}`. {_extent(lines, part, progress)}",
            "",
            "Every run is compared in two ways.",
            "",
            "- With a cold run of the same prompt alone, with a budget of 512, on the same ranks: tokens, expert ids, "
            "expert weights and the logits of every computed token have to be the same bytes (deterministic numerics; "
            "a run on injected routes is not compared this way).",
            f"- With transformers on the same tokens: logits within {LOGIT_TOLERANCE:g}; every expert set and every "
            "argmax the same, unless the reference itself is undecided (margin of the selection scores under "
            f"{ROUTE_MARGIN:g}, gap of the two best logits under {ARGMAX_GAP:g}). Such near-ties are listed; at most "
            f"{LISTED_SHARE:g} of the decisions may be. What follows a differing expert set in its sequence is not "
            "compared.",
            "",
            "States: *cold*, nothing stored; *kv_hit*, the prompt once more; *replay*, after its KV was evicted; "
            "*evicted*, after everything was evicted; *mixed*, a batch of up to eight of which some decode while "
            "others prefill; *preempted*, blocks taken by an older request and computed again; *injected*, full "
            "blocks replay the routes of transformers; *planned*, *planned_mixed*, *planned_preempted*, as replay, "
            "mixed (with every prompt computed and its KV evicted before) and preempted, with replays that travel by "
            "plans; *again_gate*, *again_negotiated*, *again_planned*, a pass over the whole prompt while its KV is "
            "there, by the gate, by its routes and by plans. *Chunk* is the token budget of a rank and step; preempted "
            "runs of chunk 1 have a budget of 2, of which the older request takes one.",
            "",
            f"**{sum(line.num_runs for line in lines):,} runs, {total.decisions:,} decisions, {len(listed)} near-ties "
            f"listed ({share:.1e}), largest logit difference {total.max_logit_difference:.1e}, "
            f"{len(failures)} failures.**",
            "",
            "| model | EP | numerics | state | chunk | runs | decisions | listed | max logit difference | failures |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(line.cells() for line in lines),
            "",
            *_details("Failures", failures),
            *_details("Listed near-ties", listed),
        ]
    )


def _extent(lines: Sequence[Line], part: Part, progress: Progress) -> str:
    whole = "the whole product" if part == Part() else "a part of the product"
    is_complete = progress.num_done == progress.num_cases
    cells = dict.fromkeys((line.ep_size, line.model) for line in lines)
    by_size = groupby(cells, key=lambda cell: cell[0])
    ran = "; ".join(f"EP {size}: {_joined([m for _, m in group])}" for size, group in by_size)
    return (
        f"It ran {progress.num_done} of the {progress.num_cases} cases of {whole}"
        f"{'' if is_complete else ' and was ended early'}, in {progress.seconds / 60:.1f} minutes. "
        f"Models at {ran}. Chunks {_joined(part.budgets)} (fast numerics: {_joined(FAST_BUDGETS)}); prompt lengths "
        f"{_joined(part.lengths)}, those of 1,000 and more in chunks under 16 only for "
        f"{' and '.join(LONG_IN_SMALL_CHUNKS)}, over EP {LONG_AT_EP} only in chunks of {BUDGETS[0]}, "
        f"and over EP {BORDERS_AT_EP} only prompts to {SHORT_LENGTHS[-1]} in chunks of 1; "
        f"{MAX_TOKENS} greedy tokens each. "
        f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}."
    )


def _joined(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _details(title: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    rest = len(entries) - SHOWN_DETAILS
    more = [f"- and {rest} more"] if rest > 0 else []
    return [f"## {title}", "", *(f"- {entry}" for entry in entries[:SHOWN_DETAILS]), *more, ""]


def main(arguments: Sequence[str]) -> int:
    """1 when anything failed or too many near-ties are listed."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle_matrix", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="results that outlive a run")
    parser.add_argument("--quick", action="store_true", help="a few minutes instead of an hour")
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument(
        "--planned",
        action="store_true",
        help="also the states whose replays travel by plans, and passes over kept KV",
    )
    parser.add_argument("--ep-sizes", nargs="+", type=int)
    parser.add_argument("--budgets", nargs="+", type=int, choices=BUDGETS)
    options = parser.parse_args(arguments)
    base = QUICK if options.quick else Part()
    part = Part(
        tuple(options.models or base.models),
        tuple(options.ep_sizes or base.ep_sizes),
        tuple(options.budgets or base.budgets),
        base.lengths,
        (*base.states, *PLANNED_STATES, *AGAIN_STATES) if options.planned else base.states,
    )
    torch.set_num_threads(1)
    command = " ".join(["python -m tests.oracle_matrix", *arguments])
    lines = run(part, options.out, command, Kept(options.keep))
    total = sum((line.compared for line in lines), Comparison())
    too_many = len(total.listed) > LISTED_SHARE * total.decisions
    return int(too_many or any(line.failures for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
