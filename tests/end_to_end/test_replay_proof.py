"""Route replay computes no gate, and what it replays is what the experts get."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.helpers.equality import byte_differences
from tests.helpers.laboratory import DEMO, Laboratory
from tests.helpers.states import (
    BLOCK_SIZE,
    ObservedRanks,
    altered,
    observed_ranks,
    random_prompt,
)
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

EP_SIZES = (1, 2)


@pytest.fixture(scope="module", params=EP_SIZES)
def observed(request: pytest.FixtureRequest) -> Iterator[ObservedRanks]:
    with observed_ranks(DEMO_MODEL_DIR, ep_size=request.param) as observed:
        yield observed


@pytest.mark.parametrize("length", [5, 16, 47, 100])
def test_without_kv_full_blocks_are_replayed_and_nothing_is_cached(
    observed: ObservedRanks, length: int
) -> None:
    bench, prompt = observed.bench(budget=512), random_prompt(length, seed=50)
    bench.generate(prompt, 4)
    bench.harness.engine.evict("kv")
    completion = bench.generate(prompt, 4).completion
    counts = completion.cached_tokens, completion.replayed_tokens
    assert counts == (0, length // BLOCK_SIZE * BLOCK_SIZE)


@pytest.mark.parametrize("length", [5, 16, 47, 100])
@pytest.mark.parametrize("budget", [7, 512])
def test_the_gate_sees_only_tokens_without_routes(
    observed: ObservedRanks, length: int, budget: int
) -> None:
    bench, prompt = observed.bench(budget=budget), random_prompt(length, seed=51)
    bench.generate(prompt, 4)
    bench.harness.engine.evict("kv")
    before = bench.num_gate_tokens
    bench.generate(prompt, 4)
    assert bench.num_gate_tokens - before == length % BLOCK_SIZE + 3


def test_a_replayed_request_answers_with_the_bytes_of_the_first(observed: ObservedRanks) -> None:
    bench, prompt = observed.bench(budget=512), random_prompt(100, seed=52)
    cold = bench.generate(prompt, 4)
    bench.harness.engine.evict("kv")
    assert byte_differences(bench.generate(prompt, 4), cold) == []


@pytest.mark.parametrize(("model", "ep_size"), [(DEMO, 1), (DEMO, 2), ("qwen3", 2)])
def test_a_prompt_of_full_blocks_is_served_with_ruined_gates(
    laboratory: Laboratory, model: str, ep_size: int
) -> None:
    with observed_ranks(laboratory.model_dir(model), ep_size=ep_size) as observed:
        bench, prompt = observed.bench(budget=24), random_prompt(96, seed=53)
        cold = bench.generate(prompt, 1)
        observed.observations.poison_gates()
        bench.harness.engine.evict("kv")
        assert byte_differences(bench.generate(prompt, 1), cold) == []


def test_generated_tokens_are_served_with_ruined_gates() -> None:
    with observed_ranks(DEMO_MODEL_DIR) as observed:
        bench, prompt = observed.bench(budget=512), random_prompt(40, seed=54)
        cold = bench.generate(prompt, 25)
        observed.observations.poison_gates()
        bench.harness.engine.evict("kv")
        known = [*prompt, *cold.token_ids[:24]]
        assert bench.generate(known, 1).token_ids == cold.token_ids[24:]


def test_a_prompt_without_routes_is_not_served_with_ruined_gates() -> None:
    with observed_ranks(DEMO_MODEL_DIR) as observed:
        observed.observations.poison_gates()
        run = observed.bench(budget=512).generate(random_prompt(32, seed=55), 1)
        assert run.completion.finish_reason == "error"


@pytest.mark.parametrize("token", [3, 31])
def test_one_altered_expert_id_changes_logits_from_its_token_on(
    observed: ObservedRanks, token: int
) -> None:
    bench, prompt = observed.bench(budget=512), random_prompt(32, seed=56)
    cold = bench.generate(prompt, 1)
    routes = altered(cold.routes, token, observed.ranks.spec.gate.num_experts)
    bench.plant_routes(prompt, routes, salt="altered")
    replayed = bench.generate(prompt, 1, cache_salt="altered")
    changed = (replayed.logits() != cold.logits()).any(-1)
    assert np.flatnonzero(changed)[0] == token
    assert changed[31], "the next token's log-probs come from the last row"
