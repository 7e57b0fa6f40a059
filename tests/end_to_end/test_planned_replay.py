"""Planned dispatch changes nothing but the time: replays that travel by plans give the bytes of a cold run."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.helpers.equality import ReferenceModel, byte_differences
from tests.helpers.laboratory import DEMO, Laboratory
from tests.helpers.states import (
    PLANNED_STATES,
    Bench,
    ObservedRanks,
    RequestRun,
    State,
    altered,
    observed_ranks,
    random_prompt,
    run_state,
)
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

PROMPTS = [random_prompt(length, seed=200 + length) for length in (33, 150)]
MAX_TOKENS = 4


@pytest.fixture(scope="module", params=[1, 2, 4])
def observed(request: pytest.FixtureRequest) -> Iterator[ObservedRanks]:
    with observed_ranks(DEMO_MODEL_DIR, ep_size=request.param) as observed:
        yield observed


def cold_runs(observed: ObservedRanks) -> list[RequestRun]:
    return [observed.bench(budget=512).generate(prompt, MAX_TOKENS) for prompt in PROMPTS]


def planned_share(bench: Bench) -> float:
    tokens = bench.replayed_tokens
    return tokens["planned"] / sum(tokens.values())


@pytest.mark.parametrize("budget", [16, 512])
@pytest.mark.parametrize("state", PLANNED_STATES)
def test_tokens_routes_and_logits_are_the_bytes_of_a_cold_run(
    observed: ObservedRanks, state: State, budget: int
) -> None:
    runs = run_state(observed, state, budget, PROMPTS, MAX_TOKENS)
    pairs = zip(runs, cold_runs(observed), strict=True)
    assert [byte_differences(run, cold) for run, cold in pairs] == [[], []]


def test_replays_beside_decodes_travel_planned(observed: ObservedRanks) -> None:
    bench = observed.bench(budget=64, fragment_tokens=16)
    prompts = [random_prompt(length, seed=300 + length) for length in (90, 70, 49)]
    cold = [bench.generate(prompt, MAX_TOKENS) for prompt in prompts]
    bench.harness.engine.evict("kv")
    for seed in range(4):
        bench.submit(random_prompt(5, seed=seed), 20)
    bench.step(3)
    seq_ids = [bench.submit(prompt, MAX_TOKENS) for prompt in prompts]
    bench.finish()
    assert planned_share(bench) >= 0.95
    pairs = [(bench.run_of(seq_id), run) for seq_id, run in zip(seq_ids, cold, strict=True)]
    assert [byte_differences(*pair) for pair in pairs] == [[]] * len(prompts)


@pytest.mark.parametrize("token", [3, 31])
def test_one_altered_expert_id_changes_logits_from_its_token_on(
    observed: ObservedRanks, token: int
) -> None:
    bench, prompt = observed.bench(budget=512, fragment_tokens=16), random_prompt(32, seed=56)
    cold = bench.generate(prompt, 1)
    routes = altered(cold.routes, token, observed.ranks.spec.gate.num_experts)
    bench.plant_routes(prompt, routes, salt="altered")
    replayed = bench.generate(prompt, 1, cache_salt="altered")
    assert bench.replayed_tokens == {"planned": 32, "negotiated": 0}
    changed = (replayed.logits() != cold.logits()).any(-1)
    assert np.flatnonzero(changed)[0] == token


@pytest.mark.parametrize(("model", "ep_size"), [(DEMO, 1), (DEMO, 2), ("qwen3", 2), (DEMO, 8)])
def test_a_prompt_of_full_blocks_is_served_with_ruined_gates(
    laboratory: Laboratory, model: str, ep_size: int
) -> None:
    model_dir = laboratory.model_dir(model)
    with observed_ranks(model_dir, ep_size=ep_size, num_kv_blocks=40) as observed:
        bench, prompt = observed.bench(budget=50, fragment_tokens=24), random_prompt(96, seed=53)
        cold = bench.generate(prompt, 1)
        observed.observations.poison_gates()
        bench.harness.engine.evict("kv")
        assert byte_differences(bench.generate(prompt, 1), cold) == []
        assert bench.replayed_tokens == {"planned": 96, "negotiated": 0}


@pytest.mark.parametrize("state", PLANNED_STATES)
def test_fast_numerics_agree_with_transformers(state: State) -> None:
    reference = ReferenceModel(DEMO_MODEL_DIR)
    with observed_ranks(DEMO_MODEL_DIR, ep_size=2, deterministic=False) as observed:
        runs = run_state(observed, state, 64, PROMPTS, MAX_TOKENS)
    assert [reference.compare(run).failures for run in runs] == [(), ()]


def test_eight_ranks_replay_the_bytes_of_a_cold_run() -> None:
    prompt = random_prompt(32, seed=58)
    with observed_ranks(DEMO_MODEL_DIR, ep_size=8, num_kv_blocks=40) as observed:
        bench = observed.bench(budget=64, fragment_tokens=16)
        cold = bench.generate(prompt, 2)
        bench.harness.engine.evict("kv")
        assert byte_differences(bench.generate(prompt, 2), cold) == []
        assert bench.replayed_tokens == {"planned": 32, "negotiated": 0}
