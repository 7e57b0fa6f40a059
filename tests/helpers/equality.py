"""Two runs equal to the byte; a run equal to the reference up to near-ties that are listed.

Letters: T tokens, L MoE layers, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.helpers.oracle import (
    Reference,
    compare_routes,
    load_reference,
    reference_greedy,
    reference_pass,
)
from tests.helpers.states import RequestRun

LOGIT_TOLERANCE = 1e-4
ROUTE_MARGIN = 1e-5
ARGMAX_GAP = 1e-4
LISTED_SHARE = 1e-4
"""At most so many of the compared decisions may be near-ties that went the other way."""


def byte_differences(run: RequestRun, baseline: RequestRun) -> list[str]:
    """What differs, in words; empty when tokens, routes and all logits that were computed are the same bytes.

    baseline: computed every token once
    """
    if run.token_ids != baseline.token_ids:
        return [f"tokens {run.token_ids}, expected {baseline.token_ids}"]
    differences = []
    mine, expected = run.routes, baseline.routes
    for name, a, b in (
        ("expert ids", mine.topk_ids, expected.topk_ids),
        ("expert weights", mine.topk_weights, expected.topk_weights),
    ):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            differences.append(f"{name} {a.dtype} {a.shape}, expected {b.dtype} {b.shape}")
        elif a.tobytes() != b.tobytes():
            first = int(np.argwhere(a != b)[0][0])
            differences.append(f"{name} differ from position {first} on")
    logits = baseline.logits()
    for chunk in run.chunks:
        rows = logits[chunk.first_position : chunk.end_position]
        if chunk.logits.tobytes() != rows.tobytes():
            largest = float(np.abs(chunk.logits - rows).max())
            end = chunk.end_position
            differences.append(
                f"logits of [{chunk.first_position}, {end}) differ by up to {largest:.2e}"
            )
    return differences


@dataclass(frozen=True)
class Comparison:
    """decisions: gate and argmax decisions compared; listed: near-ties of the reference that went the other way."""

    decisions: int = 0
    listed: tuple[str, ...] = ()
    max_logit_difference: float = 0.0
    failures: tuple[str, ...] = ()

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(
            decisions=self.decisions + other.decisions,
            listed=self.listed + other.listed,
            max_logit_difference=max(self.max_logit_difference, other.max_logit_difference),
            failures=self.failures + other.failures,
        )


class ReferenceModel:
    """transformers on one checkpoint; passes are kept, so that many runs of one sequence cost one."""

    def __init__(self, model_dir: Path) -> None:
        self.model: Any = load_reference(model_dir)
        self._passes: dict[tuple[int, ...], Reference] = {}

    def pass_of(self, token_ids: list[int]) -> Reference:
        key = tuple(token_ids)
        if key not in self._passes:
            self._passes[key] = reference_pass(self.model, token_ids)
        return self._passes[key]

    def compare(self, run: RequestRun) -> Comparison:
        """With a pass over what the run put in."""
        return compare_with_reference(run, self.pass_of(run.computed_token_ids))

    def first_other_token(self, run: RequestRun) -> int | None:
        """Place of the first output token that the model's own free-running greedy generation has not.

        None without one, and where a near-tie of the run is listed: from there on both may go their own way.
        """
        expected = reference_greedy(self.model, run.prompt, len(run.token_ids))
        if run.token_ids == expected or self.compare(run).listed:
            return None
        pairs = zip(run.token_ids, expected, strict=True)
        return next(place for place, (a, b) in enumerate(pairs) if a != b)


def compare_with_reference(run: RequestRun, reference: Reference) -> Comparison:
    """Teacher-forced with the run's own tokens: by induction its greedy tokens are the reference's.

    What follows a differing expert set is not compared: it may follow from it.
    """
    agreement = compare_routes(run.routes, reference)
    compared = Comparison(decisions=agreement.num_tokens * reference.margins.shape[1])
    if agreement.num_tokens < run.routes.num_tokens:
        what = f"expert set of token {agreement.num_tokens}, margin {agreement.margin:.2e}"
        compared += _judged(what, agreement.margin < ROUTE_MARGIN)
    for chunk in run.chunks:
        end = min(chunk.end_position, agreement.num_tokens)
        if chunk.first_position < end:
            rows = torch.from_numpy(chunk.logits[: end - chunk.first_position])
            compared += _compare_logits(rows, reference, chunk.first_position)
    return compared + _compare_output(run, reference, agreement.num_tokens)


def _judged(what: str, is_near_tie: bool) -> Comparison:
    return Comparison(listed=(what,)) if is_near_tie else Comparison(failures=(what,))


def _compare_logits(rows: Tensor, reference: Reference, first: int) -> Comparison:
    """rows: [T, V] of the tokens from `first` on."""
    expected = reference.logits[first : first + len(rows)]
    difference = float((rows - expected).abs().max())
    compared = Comparison(decisions=len(rows), max_logit_difference=difference)
    if not difference < LOGIT_TOLERANCE:
        compared += Comparison(
            failures=(f"logits of [{first}, {first + len(rows)}) by {difference:.2e}",)
        )
    for offset in (rows.argmax(-1) != expected.argmax(-1)).nonzero().flatten().tolist():
        compared += _judged_argmax(reference, first + offset)
    return compared


def _compare_output(run: RequestRun, reference: Reference, end: int) -> Comparison:
    """The tokens that the client got, as far as the routes agree."""
    compared = Comparison()
    for place, token_id in enumerate(run.token_ids):
        position = len(run.prompt) - 1 + place
        if position < end and token_id != int(reference.logits[position].argmax()):
            compared += _judged_argmax(reference, position)
    return compared


def _judged_argmax(reference: Reference, position: int) -> Comparison:
    best, second = reference.logits[position].topk(2).values.tolist()
    what = f"argmax after token {position}, gap {best - second:.2e}"
    return _judged(what, best - second < ARGMAX_GAP)
