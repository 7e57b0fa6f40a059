"""Sampled tokens hang on seed and position, not on how the request was served."""

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.states import Bench, ObservedRanks, observed_ranks, random_prompt
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

PROMPT = random_prompt(37, seed=100)
MAX_TOKENS = 12
BARRED = tuple(range(0, 3000, 40))
SAMPLING = {
    "temperature": 1.0,
    "top_p": 0.9,
    "seed": 1234,
    "top_k": 200,
    "min_p": 0.001,
    "min_tokens": 6,
    "barred_token_ids": BARRED,
}


@pytest.fixture(scope="module", params=[1, 2])
def observed(request: pytest.FixtureRequest) -> Iterator[ObservedRanks]:
    with observed_ranks(DEMO_MODEL_DIR, ep_size=request.param) as observed:
        yield observed


def sampled_alone(observed: ObservedRanks, **changes: object) -> list[int]:
    bench = observed.bench(budget=512)
    return bench.generate(PROMPT, MAX_TOKENS, **(SAMPLING | changes)).token_ids


def in_a_batch_of_eight(observed: ObservedRanks) -> tuple[Bench, int]:
    bench = observed.bench(budget=512)
    for number in range(7):
        bench.submit(
            random_prompt(5 + 4 * number, seed=number), 14, **(SAMPLING | {"seed": number})
        )
        bench.step(1)
    return bench, bench.submit(PROMPT, MAX_TOKENS, **SAMPLING)


def in_chunks(observed: ObservedRanks) -> tuple[Bench, int]:
    bench = observed.bench(budget=5)
    return bench, bench.submit(PROMPT, MAX_TOKENS, **SAMPLING)


def after_a_preemption(observed: ObservedRanks) -> tuple[Bench, int]:
    bench = observed.bench(budget=512, num_kv_blocks=4)
    for rank in range(observed.ranks.options.ep_size):
        bench.submit(random_prompt(12, seed=rank), 30)
    return bench, bench.submit(PROMPT, MAX_TOKENS, **SAMPLING)


def from_cache(observed: ObservedRanks) -> tuple[Bench, int]:
    bench = observed.bench(budget=512)
    bench.generate(PROMPT, 1)
    return bench, bench.submit(PROMPT, MAX_TOKENS, **SAMPLING)


def replayed(observed: ObservedRanks) -> tuple[Bench, int]:
    bench = observed.bench(budget=512)
    bench.generate(PROMPT, 1)
    bench.harness.engine.evict("kv")
    return bench, bench.submit(PROMPT, MAX_TOKENS, **SAMPLING)


WAYS = [in_a_batch_of_eight, in_chunks, after_a_preemption, from_cache, replayed]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_same_seed_draws_the_same_tokens(
    observed: ObservedRanks, way: Callable[[ObservedRanks], tuple[Bench, int]]
) -> None:
    bench, seq_id = way(observed)
    bench.finish()
    assert bench.run_of(seq_id).token_ids == sampled_alone(observed)


def test_the_preempted_way_preempts(observed: ObservedRanks) -> None:
    bench, seq_id = after_a_preemption(observed)
    bench.finish()
    assert bench.run_of(seq_id).num_computed > len(PROMPT) + MAX_TOKENS - 1


def test_another_seed_draws_other_tokens(observed: ObservedRanks) -> None:
    drawn = {tuple(sampled_alone(observed, seed=seed)) for seed in (1, 2, 3, 1234)}
    assert len(drawn) == 4


def test_sampled_tokens_are_not_the_greedy_ones(observed: ObservedRanks) -> None:
    assert sampled_alone(observed) != sampled_alone(observed, temperature=0.0)
