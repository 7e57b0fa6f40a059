"""Shared prefixes, few blocks, evictions and aborts at random: every answer is that of a request alone, to the byte."""

import random

import pytest

from tests.helpers.engines import CLIENT
from tests.helpers.equality import byte_differences
from tests.helpers.states import Bench, RequestRun, observed_ranks, random_prompt
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

NUM_REQUESTS = 24


def serve_traffic(bench: Bench, rng: random.Random) -> list[RequestRun]:
    """What every request that was not aborted answered."""
    stems = [random_prompt(60, seed=rng.randrange(10**6)) for _ in range(3)]
    alive = []
    for number in range(NUM_REQUESTS):
        stem = rng.choice(stems)[: rng.randrange(1, 60)]
        prompt = [*stem, *random_prompt(rng.randrange(0, 20), seed=number)]
        alive.append(bench.submit(prompt, rng.randrange(1, 14)))
        for _ in range(rng.randrange(0, 5)):
            if bench.harness.engine.has_work:
                bench.step(1)
        if rng.random() < 0.15:
            bench.harness.engine.evict(rng.choice(["kv", "routes", "all"]))
        if rng.random() < 0.1 and bench.is_under_way(alive[-1]):
            bench.harness.engine.abort(CLIENT, f"r{alive.pop()}")
    bench.finish()
    return [bench.run_of(seq_id) for seq_id in alive]


@pytest.mark.parametrize(("ep_size", "seed"), [(1, 1), (1, 2), (2, 5), (4, 7)])
def test_every_answer_is_that_of_a_request_alone(ep_size: int, seed: int) -> None:
    rng = random.Random(seed)
    with observed_ranks(DEMO_MODEL_DIR, ep_size=ep_size) as observed:
        bench = observed.bench(
            budget=rng.choice([5, 16, 64]), num_kv_blocks=rng.choice([8, 12]), max_num_seqs=6
        )
        runs = serve_traffic(bench, rng)
        alone = observed.bench(budget=512)
        differences = [
            byte_differences(
                run, alone.generate(run.prompt, len(run.token_ids), cache_salt=f"alone-{number}")
            )
            for number, run in enumerate(runs)
        ]
    assert differences == [[]] * len(runs)
