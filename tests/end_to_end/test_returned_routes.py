"""Routes that a client gets: the same shape, ids and weights wherever they came from."""

from collections.abc import Callable, Iterator

import pytest

from cluster.routes import ExpertRoutes
from tests.helpers.states import Bench, ObservedRanks, observed_ranks, random_prompt
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

PROMPT = random_prompt(75, seed=60)
MAX_TOKENS = 6


@pytest.fixture(scope="module", params=[1, 2])
def observed(request: pytest.FixtureRequest) -> Iterator[ObservedRanks]:
    with observed_ranks(DEMO_MODEL_DIR, ep_size=request.param) as observed:
        yield observed


def routes_without_sharing(observed: ObservedRanks) -> ExpertRoutes:
    """Nothing in the store and replay off."""
    return observed.bench(budget=512, route_replay=False).generate(PROMPT, MAX_TOKENS).routes


def cold(observed: ObservedRanks) -> Bench:
    return observed.bench(budget=512)


def warm(observed: ObservedRanks) -> Bench:
    bench = cold(observed)
    bench.generate(PROMPT, MAX_TOKENS)
    return bench


def warm_in_part(observed: ObservedRanks) -> Bench:
    bench = cold(observed)
    bench.generate([*PROMPT[:40], *random_prompt(30, seed=61)], MAX_TOKENS)
    return bench


def without_kv(observed: ObservedRanks) -> Bench:
    bench = warm(observed)
    bench.harness.engine.evict("kv")
    return bench


def without_routes(observed: ObservedRanks) -> Bench:
    bench = warm(observed)
    bench.harness.engine.evict("routes")
    return bench


def without_the_end_of_kv(observed: ObservedRanks) -> Bench:
    """Another request took the blocks of this prompt's end."""
    bench = observed.bench(budget=512, num_kv_blocks=7)
    bench.generate(PROMPT, MAX_TOKENS)
    for number in range(observed.ranks.options.ep_size):
        bench.submit(random_prompt(60, seed=62 + number), 1)
    bench.finish()
    return bench


def without_replay(observed: ObservedRanks) -> Bench:
    bench = observed.bench(budget=512, route_replay=False)
    bench.generate(PROMPT, MAX_TOKENS)
    bench.harness.engine.evict("kv")
    return bench


def in_chunks(observed: ObservedRanks) -> Bench:
    return observed.bench(budget=7)


WAYS = [
    cold, warm, warm_in_part, without_kv, without_routes, without_the_end_of_kv, without_replay,
    in_chunks,
]  # fmt: skip


@pytest.mark.parametrize("prepared", WAYS, ids=lambda way: way.__name__)
def test_routes_are_those_of_a_request_that_shares_nothing(
    observed: ObservedRanks, prepared: Callable[[ObservedRanks], Bench]
) -> None:
    routes = prepared(observed).generate(PROMPT, MAX_TOKENS).routes
    expected = routes_without_sharing(observed)
    assert as_bytes(routes) == as_bytes(expected)


def test_a_preempted_requests_routes_are_those_of_one_that_shares_nothing(
    observed: ObservedRanks,
) -> None:
    bench = observed.bench(budget=512, num_kv_blocks=6)
    for rank in range(observed.ranks.options.ep_size):
        bench.submit(random_prompt(12, seed=70 + rank), 40)
    seq_id = bench.submit(PROMPT, MAX_TOKENS)
    bench.finish()
    run = bench.run_of(seq_id)
    assert run.num_computed > len(PROMPT) + MAX_TOKENS - 1, "it was not preempted"
    assert as_bytes(run.routes) == as_bytes(routes_without_sharing(observed))


def test_the_end_of_kv_was_taken_and_its_routes_were_not(observed: ObservedRanks) -> None:
    completion = without_the_end_of_kv(observed).generate(PROMPT, MAX_TOKENS).completion
    assert 0 < completion.cached_tokens < 64
    assert completion.cached_tokens + completion.replayed_tokens == 64


def test_routes_cover_the_prompt_and_all_but_the_last_output_token(observed: ObservedRanks) -> None:
    shape = observed.ranks.spec.route_shape
    routes = routes_without_sharing(observed)
    expected = (len(PROMPT) + MAX_TOKENS - 1, shape.num_moe_layers, shape.num_experts_per_tok)
    assert routes.topk_ids.shape == expected


def as_bytes(routes: ExpertRoutes) -> tuple[object, ...]:
    ids, weights = routes.topk_ids, routes.topk_weights
    return ids.shape, ids.dtype, ids.tobytes(), weights.shape, weights.dtype, weights.tobytes()
