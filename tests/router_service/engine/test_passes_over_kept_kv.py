"""A request that needs the hidden states of its whole prompt passes over KV that is there and leaves it as it is."""

import pytest

from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt


@pytest.mark.parametrize("route_replay", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 33])
@pytest.mark.parametrize("budget", [1, 3, 16, 64])
def test_every_prompt_token_is_computed_and_only_missing_kv_is_written(
    length: int, budget: int, route_replay: bool
) -> None:
    harness = make_harness(budget=budget)
    prompt = make_prompt(length)
    harness.generate("cold", prompt, 6)
    harness.engine.set_features(route_replay=route_replay)
    used = harness.store.stats().kv_blocks_used
    steps = harness.engine._workers.steps
    before = len(steps)
    harness.submit("again", prompt, 6, recompute_prompt=True)
    harness.run()
    again = harness.generations["again"]
    assert_undisturbed(again, prompt, 6)
    replayed = sum(step.replayed_tokens[0] for step in steps[before:])
    gated = sum(step.gate_tokens[0] for step in steps[before:])
    assert replayed + gated == length + 5
    assert again.completion.cached_tokens == 0
    assert again.completion.replayed_tokens == replayed
    assert replayed == (length // 4 * 4 if route_replay else 0)
    assert harness.store.stats().kv_blocks_used == used


@pytest.mark.parametrize("frame_delay", [0, 3])
def test_what_the_gate_says_of_kept_kv_is_not_recorded(frame_delay: int) -> None:
    harness = make_harness(frame_delay=frame_delay)
    prompt = make_prompt(30)
    cold = harness.generate("cold", prompt, 3)
    harness.engine.set_features(route_replay=False)
    harness.submit("again", prompt, 3, recompute_prompt=True)
    harness.run()
    again = harness.generations["again"]
    assert again.routes.topk_ids.tobytes() == cold.routes.topk_ids.tobytes()
    assert_undisturbed(again, prompt, 3)


def test_a_request_that_continues_a_longer_prompt_shares_what_it_passed_over() -> None:
    harness = make_harness()
    prompt = make_prompt(20)
    harness.generate("cold", prompt, 1)
    harness.submit("again", [*prompt, *make_prompt(9, seed=5)], 4, recompute_prompt=True)
    harness.run()
    assert_undisturbed(harness.generations["again"], [*prompt, *make_prompt(9, seed=5)], 4)
    warm = harness.generate("warm", [*prompt, *make_prompt(9, seed=5)], 4)
    assert warm.completion.cached_tokens == 28


def test_preempted_before_its_first_token_it_begins_again_and_after_it_takes_kv() -> None:
    harness = make_harness(num_kv_blocks=9, budget=4)
    older, younger = make_prompt(8, seed=1), make_prompt(12, seed=2)
    harness.generate("cold", younger, 1)
    harness.submit("older", older, 24)
    harness.submit("younger", younger, 8, recompute_prompt=True)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert_undisturbed(harness.generations["older"], older, 24)
    assert_undisturbed(harness.generations["younger"], younger, 8)
