"""What a request takes from earlier ones: KV, routes or nothing, and always the output of an undisturbed run."""

import pytest

from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 33])
@pytest.mark.parametrize("budget", [1, 3, 4, 16, 64])
def test_cold_warm_and_replayed_output_equals_an_undisturbed_run(length: int, budget: int) -> None:
    harness = make_harness(budget=budget)
    prompt = make_prompt(length)
    cold = harness.generate("cold", prompt, 6)
    warm = harness.generate("warm", prompt, 6)
    harness.engine.evict("kv")
    replayed = harness.generate("replayed", prompt, 6)
    for generation in (cold, warm, replayed):
        assert_undisturbed(generation, prompt, 6)
    assert cold.completion.cached_tokens == cold.completion.replayed_tokens == 0
    assert warm.completion.cached_tokens == (length - 1) // 4 * 4
    assert replayed.completion.cached_tokens == 0
    assert replayed.completion.replayed_tokens == length // 4 * 4


def test_gate_sees_only_tokens_without_routes_after_eviction() -> None:
    harness = make_harness()
    prompt = make_prompt(22)
    harness.generate("cold", prompt, 1)
    harness.engine.evict("kv")
    before = len(harness.engine._workers.steps)
    harness.generate("replayed", prompt, 1)
    steps = harness.engine._workers.steps[before:]
    assert sum(step.gate_tokens[0] for step in steps) == 2
    assert sum(step.replayed_tokens[0] for step in steps) == 20


def test_replay_off_sends_every_token_through_the_gate_and_gives_the_same_output() -> None:
    harness = make_harness(route_replay=False)
    prompt = make_prompt(22)
    harness.generate("cold", prompt, 4)
    harness.engine.evict("kv")
    again = harness.generate("again", prompt, 4)
    assert_undisturbed(again, prompt, 4)
    assert again.completion.replayed_tokens == 0
    warm = harness.generate("warm", prompt, 4)
    assert_undisturbed(warm, prompt, 4)
    assert warm.completion.cached_tokens == 20


def test_the_second_turn_of_a_chat_hits_the_first_turns_answer() -> None:
    harness = make_harness()
    prompt = make_prompt(10)
    first = harness.generate("first", prompt, 11)
    follow_up = [*prompt, *first.token_ids, 5, 6, 7]
    second = harness.generate("second", follow_up, 4)
    assert second.completion.cached_tokens == (10 + 11 - 1) // 4 * 4
    assert_undisturbed(second, follow_up, 4)


def test_salts_share_within_and_never_across() -> None:
    harness = make_harness()
    prompt = make_prompt(17)
    cached = []
    for salt in ("a", "b", "a", None, "b", None):
        request_id = f"r{len(cached)}"
        harness.submit(request_id, prompt, 2, cache_salt=salt)
        harness.run()
        cached.append(harness.generations[request_id].completion.cached_tokens)
    assert cached == [0, 0, 16, 0, 16, 16]


def test_a_repeated_request_that_fills_the_pool_is_served_again() -> None:
    harness = make_harness(num_kv_blocks=8, budget=64)
    prompt = make_prompt(16)
    for request_id in ("first", "again"):
        assert_undisturbed(harness.generate(request_id, prompt, 16), prompt, 16)
    assert harness.scheduler.num_preemptions > 0
