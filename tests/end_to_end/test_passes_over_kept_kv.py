"""A pass over a prompt whose KV is there: logits of every token are the cold run's, by gate, routes or plans."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.helpers.laboratory import Case, Laboratory, product_cases
from tests.helpers.states import AGAIN_STATES, ObservedRanks, observed_ranks, random_prompt
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

CASES = [
    *product_cases(["demo"], [1, 4], AGAIN_STATES, (7, 512), (15, 16, 17, 150)),
    *product_cases(["odd_sizes"], [2], AGAIN_STATES, (16,), (1, 32, 100)),
    *product_cases(["qwen3"], [2], AGAIN_STATES, (16,), (1, 32, 100)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_routes_and_logits_are_the_bytes_of_a_cold_run(
    laboratory: Laboratory, case: Case
) -> None:
    outcome = laboratory.outcome(case)
    assert outcome.byte_differences == ()
    assert outcome.comparison.failures == ()


@pytest.fixture(scope="module")
def observed() -> Iterator[ObservedRanks]:
    with observed_ranks(DEMO_MODEL_DIR, ep_size=2) as observed:
        yield observed


@pytest.mark.parametrize("state", AGAIN_STATES)
def test_every_prompt_token_has_its_logits_once(observed: ObservedRanks, state: str) -> None:
    prompt = random_prompt(90, seed=90)
    bench = observed.bench(budget=32, fragment_tokens=16 * (state == "again_planned"))
    cold = bench.generate(prompt, 4)
    bench.harness.features.route_replay = state != "again_gate"
    again = bench.generate(prompt, 4, recompute_prompt=True)
    assert again.num_computed == len(prompt) + 3
    assert again.logits().tobytes() == cold.logits().tobytes()
    hit = bench.generate(prompt, 4)
    assert hit.num_computed == len(prompt) + 3 - 80


def test_without_gates_a_replayed_pass_over_kept_kv_gives_the_same_logits() -> None:
    prompt = random_prompt(96, seed=96)
    with observed_ranks(DEMO_MODEL_DIR, ep_size=2) as observed:
        bench = observed.bench(budget=64, fragment_tokens=32)
        cold = bench.generate(prompt, 1)
        observed.observations.poison_gates()
        again = bench.generate(prompt, 1, recompute_prompt=True)
        assert np.isfinite(again.logits()).all()
        assert again.logits().tobytes() == cold.logits().tobytes()
        assert bench.replayed_tokens == {"planned": 96, "negotiated": 0}
