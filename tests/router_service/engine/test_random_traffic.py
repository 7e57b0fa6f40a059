"""Random arrivals, aborts, stops, evictions and few blocks: outputs stay undisturbed and the metrics add up."""

import random

import pytest

from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt, read_metrics
from tests.helpers.engines import CLIENT


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_with_few_blocks_aborts_and_evictions_stays_undisturbed(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.choice([1, 2, 4])
    harness = make_harness(
        num_ranks,
        num_kv_blocks=rng.choice([16, 24, 60]),
        budget=rng.choice([3, 8, 32]),
        max_num_seqs=rng.choice([2, 8]),
        frame_delay=rng.choice([0, 0, 2]),
    )
    stems = [make_prompt(rng.randrange(1, 30), seed=100 + i) for i in range(4)]
    alive: dict[str, tuple[list[int], int]] = {}
    for number in range(60):
        stem = rng.choice(stems)
        prompt = [
            *stem[: rng.randrange(1, len(stem) + 1)],
            *make_prompt(rng.randrange(0, 9), number),
        ]
        max_tokens = rng.randrange(1, 24)
        recompute = rng.random() < 0.2
        harness.submit(f"r{number}", prompt, max_tokens, recompute_prompt=recompute)
        alive[f"r{number}"] = (prompt, max_tokens)
        for _ in range(rng.randrange(0, 4)):
            if harness.engine.has_work:
                harness.step()
        if rng.random() < 0.15:
            victim = rng.choice(list(alive))
            if harness.generations[victim].completion is None:
                harness.engine.abort(CLIENT, victim)
                del alive[victim]
        if rng.random() < 0.1:
            harness.engine.evict(rng.choice(["kv", "routes", "all"]))
        harness.store.check_invariants()
    harness.run()
    for request_id, (prompt, max_tokens) in alive.items():
        assert_undisturbed(harness.generations[request_id], prompt, max_tokens)
    harness.engine.evict("all")
    stats = harness.store.stats()
    assert stats.num_nodes == 0
    assert all(used == 0 for used in stats.kv_blocks_used)


@pytest.mark.parametrize("seed", range(12))
def test_tokens_and_ends_add_up_in_the_metrics_whatever_happens(seed: int) -> None:
    rng = random.Random(1000 + seed)
    harness = make_harness(
        rng.choice([1, 2, 3]),
        num_kv_blocks=rng.choice([10, 16, 40]),
        budget=rng.choice([1, 5, 32]),
        max_num_seqs=rng.choice([1, 4]),
        frame_delay=rng.choice([0, 1, 5]),
        route_replay=rng.random() < 0.7,
    )
    prompts = [make_prompt(rng.randrange(1, 20), seed=rng.randrange(5)) for _ in range(40)]
    num_aborted, requests = 0, []
    for number, prompt in enumerate(prompts):
        harness.submit(f"r{number}", prompt, rng.randrange(1, 16))
        requests.append(harness.engine._by_seq_id[number])
        for _ in range(rng.randrange(0, 6)):
            if harness.engine.has_work:
                harness.step()
        chosen = f"r{rng.randrange(number + 1)}"
        event = rng.choice(["abort", "finish", "poison", "evict", "nothing", "nothing"])
        if event == "abort" and harness.generations[chosen].completion is None:
            harness.engine.abort(CLIENT, chosen)
            harness.generations[chosen].completion = "aborted"
            num_aborted += 1
        elif event == "finish":
            harness.engine.finish(CLIENT, chosen, len(harness.generations[chosen].token_ids))
        elif event == "poison":
            harness.engine._workers.poisoned.add(rng.randrange(number + 1))
        elif event == "evict":
            harness.engine.evict(rng.choice(["kv", "routes", "all"]))
        harness.store.check_invariants()
    harness.run()
    sample = read_metrics(harness)
    finished = sample("requests_finished_total")
    assert sum(finished.values()) == len(prompts)
    assert finished.get("abort", 0) == num_aborted
    admitted = sum(r.num_prompt_tokens for r in requests if r.was_admitted)
    assert sum(sample("prompt_tokens_total").values()) == admitted
    steps = harness.engine._workers.steps
    num_gate_tokens = sum(sum(step.gate_tokens.values()) for step in steps)
    assert sum(sample("gate_tokens_total").values()) == num_gate_tokens
    generations = harness.generations.values()
    assert all(generation.completion is not None for generation in generations)
    outputs = [len(generation.token_ids) for generation in generations]
    assert sum(sample("generation_tokens_total").values()) == sum(outputs)
    first_tokens = sample("time_to_first_token_seconds_count")
    assert sum(first_tokens.values()) == sum(map(bool, outputs))
    assert harness.engine._workers.sequences == set()
    harness.engine.evict("all")
    assert not any(harness.store.stats().kv_blocks_used)
