"""Models, EP sizes, numerics, states, chunk sizes and prompt lengths: every pair of values in some run.

Combinations of many steps are left to `make oracle`: a prompt of more than 64 chunks.
"""

from collections import Counter
from itertools import combinations
from typing import Any

import pytest

from tests.helpers.all_pairs import Row, all_pairs, pairs
from tests.helpers.equality import LISTED_SHARE, Comparison
from tests.helpers.laboratory import Case, Laboratory

FACTORS: dict[str, list[Any]] = {
    "model": [
        "demo",
        "plain",
        "one_group",
        "odd_sizes",
        "many_experts",
        "yarn",
        "qwen3",
        "qwen3_odd_sizes",
    ],
    "ep_size": [1, 2, 4],
    "deterministic": [True, False],
    "state": ["cold", "kv_hit", "replay", "mixed", "preempted", "injected"],
    "budget": [512, 16, 7, 1],
    "length": [32, 33, 255, 256, 257, 1000, 2000],
}
MAX_CHUNKS = 64


def allowed(row: Row) -> bool:
    return bool(row.get("length", 0) <= MAX_CHUNKS * row.get("budget", MAX_CHUNKS * 1000))


ROWS = all_pairs(FACTORS, allowed)
CASES = sorted(
    (
        Case(
            row["model"],
            row["ep_size"],
            row["state"],
            row["budget"],
            (row["length"],),
            row["deterministic"],
        )
        for row in ROWS
    ),
    key=lambda case: (case.model, case.ep_size, case.deterministic),
)
DETERMINISTIC = [case for case in CASES if case.deterministic and case.state != "injected"]


def test_the_design_holds_every_allowed_pair() -> None:
    seen = Counter(pair for row in ROWS for pair in combinations(row.items(), 2))
    assert set(pairs(FACTORS, allowed)) <= set(seen)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    laboratory: Laboratory, case: Case
) -> None:
    assert laboratory.outcome(case).comparison.failures == ()


@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_tokens_routes_and_logits_are_the_bytes_of_a_cold_run(
    laboratory: Laboratory, case: Case
) -> None:
    assert laboratory.outcome(case).byte_differences == ()


def test_near_ties_that_went_the_other_way_are_rare(laboratory: Laboratory) -> None:
    total = sum((laboratory.outcome(case).comparison for case in CASES), Comparison())
    assert len(total.listed) <= LISTED_SHARE * total.decisions
