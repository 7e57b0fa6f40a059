"""Several choices of one prompt: it is computed once, by the gate once, and each choice goes its own way."""

import random

import pytest

from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt, read_metrics
from tests.helpers.engines import CLIENT, EngineHarness


def submit_choices(
    harness: EngineHarness, prompt: list[int], max_tokens: int, num_choices: int, name: str = "r"
) -> list[str]:
    ids = [f"{name}-{choice}" for choice in range(num_choices)]
    for choice, request_id in enumerate(ids):
        leader_id = ids[0] if choice else None
        harness.submit(request_id, prompt, max_tokens, choice=choice, leader_id=leader_id)
    return ids


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("length", [1, 4, 5, 33])
@pytest.mark.parametrize("frame_delay", [0, 3])
def test_the_gate_sees_the_prompt_once_for_all_choices(
    num_ranks: int, length: int, frame_delay: int
) -> None:
    harness = make_harness(num_ranks, frame_delay=frame_delay)
    prompt = make_prompt(length)
    ids = submit_choices(harness, prompt, 5, 4)
    harness.run()
    for request_id in ids:
        assert_undisturbed(harness.generations[request_id], prompt, 5)
    steps = harness.engine._workers.steps
    gated = sum(sum(step.gate_tokens.values()) for step in steps)
    assert gated == length + 4 * 4  # and every choice its own output but the last token
    metric = read_metrics(harness)
    assert metric("prompt_tokens_total") == {"computed": length, "cached": 0, "replayed": 0}
    assert metric("generation_tokens_total") == {"": 20}


def test_without_the_store_other_choices_replay_the_leaders_routes() -> None:
    harness = make_harness()
    harness.engine.set_features(prefix_store=False, route_replay=False)
    prompt = make_prompt(21)
    ids = submit_choices(harness, prompt, 3, 3)
    harness.run()
    for request_id in ids:
        assert_undisturbed(harness.generations[request_id], prompt, 3)
    steps = harness.engine._workers.steps
    assert sum(step.gate_tokens[0] for step in steps) == 21 + 3 * 2
    assert sum(step.replayed_tokens[0] for step in steps) == 2 * 21


@pytest.mark.parametrize("num_steps", range(6))
def test_choices_go_on_when_their_leader_is_aborted(num_steps: int) -> None:
    harness = make_harness(budget=4, frame_delay=1)
    prompt = make_prompt(13)
    ids = submit_choices(harness, prompt, 4, 3)
    for _ in range(num_steps):
        harness.step()
    harness.engine.abort(CLIENT, ids[0])
    harness.run()
    for request_id in ids[1:]:
        assert_undisturbed(harness.generations[request_id], prompt, 4)


def test_a_leader_that_has_ended_before_they_come_is_not_waited_for() -> None:
    harness = make_harness()
    prompt = make_prompt(9)
    harness.generate("gone", prompt, 2)
    harness.submit("late", prompt, 4, choice=1, leader_id="gone")
    harness.run()
    assert_undisturbed(harness.generations["late"], prompt, 4)


def test_choices_of_one_prompt_draw_with_the_leaders_seed_and_their_own_number() -> None:
    harness = make_harness()
    starts = harness.engine._workers.starts
    submit_choices(harness, make_prompt(6), 2, 3)
    harness.run()
    assert [(start.seed, start.choice) for start in starts] == [(7, 0), (7, 1), (7, 2)]


@pytest.mark.parametrize("seed", range(8))
def test_choices_among_other_traffic_with_few_blocks_stay_undisturbed(seed: int) -> None:
    rng = random.Random(seed)
    harness = make_harness(
        rng.choice([1, 2]),
        num_kv_blocks=rng.choice([14, 30]),
        budget=rng.choice([3, 16]),
        max_num_seqs=rng.choice([2, 8]),
        frame_delay=rng.choice([0, 2]),
    )
    alive: dict[str, tuple[list[int], int]] = {}
    for number in range(15):
        prompt, max_tokens = make_prompt(rng.randrange(1, 25), number), rng.randrange(1, 20)
        num_choices = rng.choice([1, 1, 2, 5])
        for request_id in submit_choices(harness, prompt, max_tokens, num_choices, f"g{number}"):
            alive[request_id] = prompt, max_tokens
        for _ in range(rng.randrange(6)):
            if harness.engine.has_work:
                harness.step()
        if rng.random() < 0.3:
            victim = rng.choice(list(alive))
            if harness.generations[victim].completion is None:
                harness.engine.abort(CLIENT, victim)
                del alive[victim]
        if rng.random() < 0.2:
            harness.engine.evict(rng.choice(["kv", "all"]))
    harness.run()
    for request_id, (prompt, max_tokens) in alive.items():
        assert_undisturbed(harness.generations[request_id], prompt, max_tokens)
    harness.engine.evict("all")
    assert all(used == 0 for used in harness.store.stats().kv_blocks_used)
