"""Features switched between steps: the same output and routes, and nothing that is off is used."""

import random

import pytest

from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt, read_metrics
from tests.helpers.content_workers import oracle
from tests.helpers.engines import EngineHarness
from tests.helpers.planned_content import make_planned_harness

FEATURES = ("route_replay", "planned_dispatch", "prefix_store")


def run_steps(harness: EngineHarness, num_steps: int) -> None:
    for _ in range(num_steps):
        harness.step()
        harness.store.check_invariants()


def source_of(harness: EngineHarness, request_id: str) -> tuple[int, int]:
    """Cached and replayed prompt tokens."""
    completion = harness.generations[request_id].completion
    assert completion is not None
    return completion.cached_tokens, completion.replayed_tokens


@pytest.mark.parametrize("seed", range(24))
def test_output_and_routes_are_the_same_whatever_is_switched_when(seed: int) -> None:
    rng = random.Random(3000 + seed)
    harness = make_planned_harness(
        rng.choice([1, 2, 4]),
        fragment_tokens=rng.choice([4, 8]),
        memory_bytes=rng.choice([2_000, 2**20]),
        compile_delay=rng.choice([0, 2]),
        num_kv_blocks=rng.choice([16, 24, 60]),
        budget=rng.choice([3, 10, 32]),
        max_num_seqs=rng.choice([2, 8]),
        frame_delay=rng.choice([0, 1, 3]),
    )
    stems = [make_prompt(rng.randrange(8, 30), seed=100 + i) for i in range(3)]
    asked: dict[str, tuple[list[int], int]] = {}
    for number in range(50):
        stem = rng.choice(stems)
        prompt = [*stem[: rng.randrange(4, len(stem) + 1)], *make_prompt(rng.randrange(6), number)]
        asked[f"r{number}"] = prompt, rng.randrange(1, 24)
        harness.submit(f"r{number}", *asked[f"r{number}"])
        for _ in range(rng.randrange(5)):
            harness.engine.set_features(**{rng.choice(FEATURES): rng.random() < 0.5})
            if harness.engine.has_work:
                run_steps(harness, 1)
        if rng.random() < 0.1:
            harness.engine.evict(rng.choice(["kv", "routes", "all"]))
    harness.run()
    for request_id, (prompt, max_tokens) in asked.items():
        assert_undisturbed(harness.generations[request_id], prompt, max_tokens)
    assert read_metrics(harness)("route_conflicts_total") == {"": 0.0}
    harness.engine.evict("all")
    assert not any(harness.store.stats().kv_blocks_used)


def test_routes_are_recorded_and_stored_while_replay_is_off() -> None:
    harness = make_harness()
    harness.engine.set_features(route_replay=False)
    prompt = make_prompt(22)
    assert_undisturbed(harness.generate("off", prompt, 4), prompt, 4)
    harness.engine.evict("kv")
    harness.engine.set_features(route_replay=True)
    assert_undisturbed(harness.generate("on", prompt, 4), prompt, 4)
    assert source_of(harness, "on") == (0, 20)


def test_a_request_that_has_taken_routes_replays_them_when_replay_goes_off() -> None:
    harness = make_harness(budget=4)
    prompt = make_prompt(22)
    harness.generate("first", prompt, 4)
    harness.engine.evict("kv")
    harness.submit("second", prompt, 4)
    run_steps(harness, 2)
    harness.engine.set_features(route_replay=False)
    harness.run()
    assert_undisturbed(harness.generations["second"], prompt, 4)
    assert read_metrics(harness)("replayed_tokens_total")["negotiated"] == 20


def test_with_the_store_off_nothing_is_matched_and_nothing_is_published() -> None:
    harness = make_harness()
    stored, unknown = make_prompt(22, 1), make_prompt(22, 2)
    harness.generate("stored", stored, 4)
    before = harness.store.stats()
    harness.engine.set_features(prefix_store=False)
    for number, prompt in enumerate((stored, unknown, unknown)):
        assert_undisturbed(harness.generate(f"r{number}", prompt, 4), prompt, 4)
        assert source_of(harness, f"r{number}") == (0, 0)
    assert harness.store.stats() == before


def test_what_was_stored_is_matched_when_the_store_is_on_again() -> None:
    harness = make_harness()
    prompt = make_prompt(22)
    harness.generate("stored", prompt, 1)
    harness.engine.set_features(prefix_store=False)
    harness.generate("off", prompt, 1)
    harness.engine.set_features(prefix_store=True)
    assert_undisturbed(harness.generate("on", prompt, 1), prompt, 1)
    assert source_of(harness, "on") == (20, 0)


def test_with_the_store_off_nobody_waits_for_a_prefix_in_flight() -> None:
    harness = make_harness(2, budget=64)
    harness.engine.set_features(prefix_store=False)
    prompt = make_prompt(22)
    for number in range(4):
        harness.submit(f"r{number}", prompt, 3)
    run_steps(harness, 1)
    assert harness.engine.num_waiting == 0


def test_a_request_that_waits_for_a_prefix_starts_when_the_store_goes_off() -> None:
    harness = make_harness(budget=8)
    prompt = make_prompt(40)
    for number in range(2):
        harness.submit(f"r{number}", prompt, 3)
    run_steps(harness, 1)
    assert harness.engine.num_waiting == 1
    harness.engine.set_features(prefix_store=False)
    run_steps(harness, 1)
    assert harness.engine.num_waiting == 0
    harness.run()
    assert_undisturbed(harness.generations["r1"], prompt, 3)
    assert source_of(harness, "r1") == (0, 0)


@pytest.mark.parametrize("frame_delay", [0, 3])
@pytest.mark.parametrize("first_off_step", [0, 1, 3, 6])
def test_a_request_that_runs_through_an_off_period_publishes_without_a_gap(
    first_off_step: int, frame_delay: int
) -> None:
    harness = make_harness(budget=4, frame_delay=frame_delay)
    prompt = make_prompt(22)
    harness.submit("through", prompt, 24)
    run_steps(harness, first_off_step)
    harness.engine.set_features(prefix_store=False)
    run_steps(harness, 8)
    harness.engine.set_features(prefix_store=True)
    harness.run()
    follow_up = [*prompt, *oracle(prompt, 24)[0]]
    assert_undisturbed(harness.generate("next", follow_up, 3), follow_up, 3)
    assert source_of(harness, "next") == ((22 + 23) // 4 * 4, 0)


def test_a_request_admitted_with_the_store_off_meets_the_same_blocks_of_another_one() -> None:
    harness = make_harness(budget=4)
    prompt = make_prompt(22)
    harness.engine.set_features(prefix_store=False)
    harness.submit("off", prompt, 16)
    run_steps(harness, 8)
    harness.engine.set_features(prefix_store=True)
    harness.submit("on", [*prompt, 1, 2], 16)
    harness.run()
    assert_undisturbed(harness.generations["off"], prompt, 16)
    assert_undisturbed(harness.generations["on"], [*prompt, 1, 2], 16)
    assert read_metrics(harness)("route_conflicts_total") == {"": 0.0}


def replay_switching_plans(*states_before_each_step: bool) -> dict[str, float]:
    """Replays 40 tokens, 8 in a step, and says by which way they went."""
    harness = make_planned_harness(2, budget=8)
    prompt = make_prompt(43)
    harness.generate("cold", prompt, 4)
    harness.engine.evict("kv")
    harness.submit("replays", prompt, 4)
    for state in states_before_each_step:
        harness.engine.set_features(planned_dispatch=state)
        run_steps(harness, 1)
    harness.run()
    assert_undisturbed(harness.generations["replays"], prompt, 4)
    assert source_of(harness, "replays") == (0, 40)
    return read_metrics(harness)("replayed_tokens_total")


def test_with_planned_dispatch_off_replays_are_negotiated() -> None:
    assert replay_switching_plans(False) == {"negotiated": 40, "planned": 0}


def test_with_planned_dispatch_on_replays_are_planned() -> None:
    assert replay_switching_plans(True) == {"negotiated": 0, "planned": 40}


def test_planned_dispatch_goes_off_and_on_within_one_replay() -> None:
    # the first step sends the plans, each of the next ones replays 8 tokens
    ways = replay_switching_plans(True, True, False, False, True)
    assert ways == {"negotiated": 16, "planned": 24}


def test_a_request_that_waits_for_its_plan_goes_on_negotiated_when_plans_go_off() -> None:
    harness = make_planned_harness(2, budget=8, compile_delay=10**6)
    prompt = make_prompt(43)
    harness.generate("cold", prompt, 4)
    harness.engine.evict("kv")
    harness.submit("replays", prompt, 4)
    run_steps(harness, 20)
    assert read_metrics(harness)("replayed_tokens_total") == {"negotiated": 0, "planned": 0}
    harness.engine.set_features(planned_dispatch=False)
    harness.run()
    assert_undisturbed(harness.generations["replays"], prompt, 4)
    assert read_metrics(harness)("replayed_tokens_total") == {"negotiated": 40, "planned": 0}


def test_a_feature_that_is_not_named_stays_as_it_is() -> None:
    harness = make_harness()
    harness.engine.set_features(prefix_store=False)
    harness.engine.set_features(route_replay=False)
    harness.engine.set_features()
    states = harness.engine.features
    assert (states.route_replay, states.prefix_store) == (False, False)
