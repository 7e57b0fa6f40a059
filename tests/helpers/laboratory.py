"""Runs of a design, each on the right cell: one cell at a time, kept while the runs ask for it.

Owner of checkpoints, running ranks, reference models and outcomes.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from tests.helpers.equality import Comparison, ReferenceModel, byte_differences
from tests.helpers.states import (
    STORED_STATES,
    ObservedRanks,
    RequestRun,
    State,
    observed_ranks,
    random_prompt,
    run_injected,
    run_state,
    run_stored_states,
)
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR, SHAPE_VARIANTS, write_variant

MAX_TOKENS = 8
BASELINE_BUDGET = 512
DEMO = "demo"
MODELS = (DEMO, *SHAPE_VARIANTS)


@dataclass(frozen=True)
class Case:
    """One run of the design. `budget`: tokens of a rank per step; `lengths`: of the prompts.

    state "injected": the routes of all full blocks are the reference's, through the replay path
    """

    model: str
    ep_size: int
    state: State | Literal["injected"]
    budget: int
    lengths: tuple[int, ...]
    deterministic: bool = True

    def __str__(self) -> str:
        numerics = "deterministic" if self.deterministic else "fast"
        lengths = "_".join(map(str, self.lengths)) if len(self.lengths) < 4 else "short"
        return f"{self.model}-ep{self.ep_size}-{self.state}-{self.budget}-{lengths}-{numerics}"


@dataclass(frozen=True)
class Outcome:
    """byte_differences: from a run of its own, cold, with a budget of 512, on the same ranks (deterministic only)."""

    byte_differences: tuple[str, ...]
    comparison: Comparison
    num_runs: int


class Laboratory:
    """max_tokens: of every request"""

    def __init__(self, directory: Path, max_tokens: int = MAX_TOKENS) -> None:
        self._directory = directory
        self._max_tokens = max_tokens
        self._stack = ExitStack()
        self._cell: tuple[str, int, bool] | None = None
        self._observed: ObservedRanks | None = None
        self._baselines: dict[int, RequestRun] = {}
        self._reference: tuple[str, ReferenceModel] | None = None
        self._outcomes: dict[Case, Outcome] = {}

    def close(self) -> None:
        """Stops the running cell; the next case that needs one starts it."""
        self._cell = self._observed = None
        self._baselines.clear()
        self._stack.close()

    def model_dir(self, model: str) -> Path:
        if model == DEMO:
            return DEMO_MODEL_DIR
        directory = self._directory / model
        if not directory.exists():
            write_variant(directory, SHAPE_VARIANTS[model], seed=4)
        return directory

    def reference(self, model: str) -> ReferenceModel:
        if self._reference is None or self._reference[0] != model:
            self._reference = model, ReferenceModel(self.model_dir(model))
        return self._reference[1]

    def ranks(self, case: Case) -> ObservedRanks:
        """The cell that the case needs; another one is stopped."""
        cell = case.model, case.ep_size, case.deterministic
        if self._cell != cell or self._observed is None:
            self.close()
            self._observed = self._stack.enter_context(
                observed_ranks(
                    self.model_dir(case.model),
                    ep_size=case.ep_size,
                    deterministic=case.deterministic,
                )
            )
            self._cell = cell
        return self._observed

    def outcome(self, case: Case) -> Outcome:
        """Of this case alone."""
        if case not in self._outcomes:
            self._outcomes[case] = self._judge(case, self._run(case))
        return self._outcomes[case]

    def outcome_in_passing(self, case: Case) -> Outcome:
        """The same for cases that come in all stored states: one engine passes through them, cold only once."""
        if case.state not in STORED_STATES:
            return self.outcome(case)
        if case not in self._outcomes:
            runs = run_stored_states(
                self.ranks(case), case.budget, prompts_of(case), self._max_tokens
            )
            for state, state_runs in runs.items():
                sibling = Case(
                    case.model, case.ep_size, state, case.budget, case.lengths, case.deterministic
                )
                self._outcomes[sibling] = self._judge(sibling, state_runs)
        return self._outcomes[case]

    def _run(self, case: Case) -> list[RequestRun]:
        ranks, prompts = self.ranks(case), prompts_of(case)
        if case.state == "injected":
            reference = self.reference(case.model)
            routes = [reference.pass_of(prompt).routes for prompt in prompts]
            return run_injected(ranks, case.budget, prompts, routes, self._max_tokens)
        return run_state(ranks, case.state, case.budget, prompts, self._max_tokens)

    def _judge(self, case: Case, runs: list[RequestRun]) -> Outcome:
        reference = self.reference(case.model)
        compared = sum((reference.compare(run) for run in runs), Comparison())
        differences: list[str] = []
        if case.deterministic and case.state != "injected":
            for run in runs:
                found = byte_differences(run, self._baseline(case, len(run.prompt)))
                differences += [f"prompt of {len(run.prompt)}: {what}" for what in found]
        return Outcome(tuple(differences), compared, len(runs))

    def _baseline(self, case: Case, length: int) -> RequestRun:
        if length not in self._baselines:
            bench = self.ranks(case).bench(budget=BASELINE_BUDGET)
            self._baselines[length] = bench.generate(_prompt(length), self._max_tokens)
        return self._baselines[length]


def prompts_of(case: Case) -> list[list[int]]:
    return [_prompt(length) for length in case.lengths]


@lru_cache(maxsize=64)
def _prompt(length: int) -> list[int]:
    return random_prompt(length, seed=length)


def product_cases(
    models: Sequence[str],
    ep_sizes: Sequence[int],
    states: Sequence[State],
    budgets: Sequence[int],
    lengths: tuple[int, ...],
) -> list[Case]:
    """Cells outermost, so that each is started once; the states of one engine innermost."""
    return [
        Case(model, ep_size, state, budget, lengths)
        for model in models
        for ep_size in ep_sizes
        for budget in budgets
        for state in states
    ]
