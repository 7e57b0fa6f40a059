"""States times chunk sizes over short prompts around block borders: all of it for the demo model, parts for others."""

import pytest

from tests.helpers.laboratory import Case, Laboratory, product_cases
from tests.helpers.states import PLANNED_STATES, STATES

BUDGETS = (1, 7, 16, 512)
LENGTHS = (1, 15, 16, 17, 31, 32, 33)
CASES = [
    *product_cases(["demo"], [1], STATES, BUDGETS, LENGTHS),
    *product_cases(["demo"], [2], STATES, (7, 512), LENGTHS),
    *product_cases(["plain"], [1], STATES, (16,), LENGTHS),
    *product_cases(["plain"], [2], STATES, BUDGETS, LENGTHS),
    *product_cases(["qwen3"], [2], STATES, BUDGETS, (1, 16, 17, 33)),
    *product_cases(["qwen3"], [2], PLANNED_STATES, (7, 512), (33, 150)),
    *product_cases(["qwen3"], [4], (*STATES, *PLANNED_STATES), (7,), (17, 33)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_routes_and_logits_are_the_bytes_of_a_cold_run(
    laboratory: Laboratory, case: Case
) -> None:
    assert laboratory.outcome_in_passing(case).byte_differences == ()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    laboratory: Laboratory, case: Case
) -> None:
    assert laboratory.outcome_in_passing(case).comparison.failures == ()
