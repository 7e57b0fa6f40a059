"""Scores: of every generated token, of the prompt when asked, computed once and found in the store afterwards."""

import random

import numpy as np
import pytest

from cluster.scores import ScoreColumns
from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt
from tests.helpers.content_workers import Score, columns_of, oracle, score_oracle
from tests.helpers.engines import CLIENT, EngineHarness, Generation


def rows_of(columns: ScoreColumns) -> list[Score]:
    rows: list[Score] = columns.stored().rows.tolist()
    return rows


def scores_of(generation: Generation) -> list[Score]:
    """Of the generated tokens."""
    return [row for part in generation.scores for row in rows_of(part)]


def prompt_scores(generation: Generation) -> list[Score]:
    assert generation.prompt_scores is not None
    return rows_of(generation.prompt_scores)


def ask(harness: EngineHarness, name: str, prompt: list[int], max_tokens: int) -> Generation:
    harness.submit(name, prompt, max_tokens, score_prompt=True)
    harness.run()
    return harness.generations[name]


def num_computed(harness: EngineHarness, since: int) -> int:
    steps = harness.engine._workers.steps[since:]
    return sum(step.gate_tokens[0] + step.replayed_tokens[0] for step in steps)


def expected_scores(prompt: list[int], max_tokens: int) -> list[Score]:
    output, _ = oracle(prompt, max_tokens)
    return score_oracle([*prompt, *output])


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9, 33])
@pytest.mark.parametrize("budget", [1, 3, 16, 64])
def test_asked_prompt_scores_are_the_same_cold_cached_replayed_and_after_eviction(
    length: int, budget: int
) -> None:
    harness = make_harness(budget=budget)
    prompt = make_prompt(length)
    expected = expected_scores(prompt, 4)
    for number, part in enumerate((None, None, "kv", "scores", "all")):
        if part is not None:
            harness.engine.evict(part)
        generation = ask(harness, f"r{number}", prompt, 4)
        assert_undisturbed(generation, prompt, 4)
        assert prompt_scores(generation) == expected[: length - 1]
        assert scores_of(generation) == expected[length - 1 :]
    harness.store.check_invariants()


def test_scores_are_shared_within_a_salt_and_never_across() -> None:
    harness = make_harness()
    prompt = make_prompt(33)
    computed = []
    for number, salt in enumerate(("a", "b", "a", None, "b", None)):
        since = len(harness.engine._workers.steps)
        harness.submit(f"r{number}", prompt, 1, score_prompt=True, cache_salt=salt)
        harness.run()
        assert prompt_scores(harness.generations[f"r{number}"]) == expected_scores(prompt, 1)[:32]
        computed.append(num_computed(harness, since))
    assert computed == [33, 33, 2, 33, 2, 2]


def test_evicted_kv_is_replayed_within_a_salt_and_gated_in_another() -> None:
    harness = make_harness()
    prompt = make_prompt(33)
    gated = []
    for number, salt in enumerate(("a", "a", "b", "b", None)):
        harness.engine.evict("kv")
        since = len(harness.engine._workers.steps)
        harness.submit(f"r{number}", prompt, 1, cache_salt=salt)
        harness.run()
        steps = harness.engine._workers.steps[since:]
        gated.append(sum(step.gate_tokens[0] for step in steps))
    assert gated == [33, 1, 33, 1, 33]


def test_scores_that_the_store_has_are_not_computed_again() -> None:
    harness = make_harness()
    prompt = make_prompt(33)
    ask(harness, "cold", prompt, 1)
    since = len(harness.engine._workers.steps)
    again = ask(harness, "again", prompt, 1)
    assert (
        num_computed(harness, since) == 2
    )  # the last token is in no full block, so its score is not stored
    assert again.completion.cached_tokens == 31
    assert prompt_scores(again) == expected_scores(prompt, 1)[:32]


def test_missing_scores_over_kept_kv_are_computed_from_the_first_missing_one_and_recorded() -> None:
    harness = make_harness()
    prompt = make_prompt(33)
    ask(harness, "half", prompt[:17], 1)
    harness.generate("plain", prompt, 1)
    since = len(harness.engine._workers.steps)
    asked = ask(harness, "asked", prompt, 1)
    assert prompt_scores(asked) == expected_scores(prompt, 1)[:32]
    assert asked.completion.cached_tokens == 15  # the score of token 16 comes out of position 15
    assert num_computed(harness, since) == 33 - 15
    since = len(harness.engine._workers.steps)
    ask(harness, "again", prompt, 1)
    assert num_computed(harness, since) == 2


def test_generated_tokens_are_scored_for_who_scores_them_as_a_prompt_later() -> None:
    harness = make_harness()
    prompt = make_prompt(8)
    first = ask(harness, "first", prompt, 24)
    follow_up = [*prompt, *first.token_ids, 5, 6]
    since = len(harness.engine._workers.steps)
    second = ask(harness, "second", follow_up, 1)
    assert prompt_scores(second) == expected_scores(follow_up, 1)[:-1]
    assert second.completion.cached_tokens == 27
    assert num_computed(harness, since) == len(follow_up) - 27


@pytest.mark.parametrize("frame_delay", [0, 3])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 9, 33])
def test_a_prompt_can_be_scored_without_generating_anything(length: int, frame_delay: int) -> None:
    harness = make_harness(budget=8, frame_delay=frame_delay)
    prompt = make_prompt(length)
    for number, part in enumerate((None, None, "kv", "scores", "all")):
        if part is not None:
            harness.engine.evict(part)
        generation = ask(harness, f"r{number}", prompt, 0)
        assert generation.token_ids == []
        assert prompt_scores(generation) == expected_scores(prompt, 1)[: length - 1]
        completion = generation.completion
        assert completion is not None
        assert (completion.finish_reason, completion.num_output_tokens) == ("length", 0)
        np.testing.assert_array_equal(
            generation.routes.topk_ids, oracle(prompt, 1)[1][: length - 1]
        )
    harness.store.check_invariants()


def test_no_step_runs_for_a_prompt_whose_scores_are_all_stored() -> None:
    harness = make_harness()
    prompt = make_prompt(32)
    ask(harness, "cold", prompt, 1)
    since = len(harness.engine._workers.steps)
    harness.submit("again", prompt, 0, score_prompt=True, return_routes=False)
    harness.run()
    again = harness.generations["again"]
    assert prompt_scores(again) == expected_scores(prompt, 1)[:31]
    assert len(harness.engine._workers.steps) == since
    assert again.completion.finish_reason == "length"
    assert (again.completion.cached_tokens, again.completion.replayed_tokens) == (32, 0)


def test_nothing_asked_of_a_prompt_is_answered_without_a_step() -> None:
    harness = make_harness()
    harness.submit("nothing", make_prompt(20), 0, return_routes=False)
    harness.run()
    assert harness.generations["nothing"].completion.finish_reason == "length"
    assert harness.engine._workers.steps == []


def assert_listed(generation: Generation, prompt: list[int], num_listed: int) -> None:
    """Log-probs, ranks and alternatives of the prompt are those of an undisturbed run."""
    listed, expected = (
        generation.prompt_scores,
        columns_of(expected_scores(prompt, 1)[: len(prompt) - 1], num_listed),
    )
    assert listed is not None
    for name in ("chosen_logprobs", "chosen_ranks", "top_lens", "top_ids", "top_logprobs"):
        assert getattr(listed, name).tolist() == getattr(expected, name).tolist(), name


def test_alternatives_are_computed_when_more_are_asked_than_stored_and_never_again() -> None:
    harness = make_harness(num_kv_blocks=200)
    prompt = make_prompt(33)
    computed = []
    for number, num_listed in enumerate((1, 3, 3, 1, 2, 20, 5, 20)):
        since = len(harness.engine._workers.steps)
        harness.submit(
            f"r{number}", prompt, 1, score_prompt=True, num_prompt_alternatives=num_listed
        )
        harness.run()
        assert_listed(harness.generations[f"r{number}"], prompt, num_listed)
        computed.append(num_computed(harness, since))
    assert computed == [33, 33, 2, 2, 2, 33, 2, 2]
    assert harness.generations["r1"].completion.cached_tokens == 0
    assert harness.generations["r2"].completion.cached_tokens == 31


@pytest.mark.parametrize("num_listed", [2, 5, 20])
@pytest.mark.parametrize("budget", [3, 64])
def test_alternatives_are_the_same_cold_cached_replayed_and_after_eviction(
    num_listed: int, budget: int
) -> None:
    harness = make_harness(budget=budget)
    prompt = make_prompt(33)
    for number, part in enumerate((None, None, "kv", "scores", "all")):
        if part is not None:
            harness.engine.evict(part)
        harness.submit(
            f"r{number}", prompt, 4, score_prompt=True, num_prompt_alternatives=num_listed
        )
        harness.run()
        assert_listed(harness.generations[f"r{number}"], prompt, num_listed)
        assert_undisturbed(harness.generations[f"r{number}"], prompt, 4)
        harness.store.check_invariants()


def test_no_step_runs_for_a_prompt_whose_alternatives_are_all_stored() -> None:
    harness = make_harness()
    prompt = make_prompt(32)
    ways = {"score_prompt": True, "num_prompt_alternatives": 5}
    harness.submit("cold", prompt, 1, **ways)
    harness.run()
    since = len(harness.engine._workers.steps)
    harness.submit("again", prompt, 0, return_routes=False, **ways)
    harness.run()
    assert_listed(harness.generations["again"], prompt, 5)
    assert len(harness.engine._workers.steps) == since


def test_generated_tokens_keep_as_many_alternatives_as_were_asked_of_the_prompt() -> None:
    harness = make_harness()
    ways = {"score_prompt": True, "num_prompt_alternatives": 5}
    prompt = make_prompt(8)
    harness.submit("first", prompt, 24, **ways)
    harness.run()
    follow_up = [*prompt, *harness.generations["first"].token_ids, 5, 6]
    since = len(harness.engine._workers.steps)
    harness.submit("second", follow_up, 1, **ways)
    harness.run()
    assert_listed(harness.generations["second"], follow_up, 5)
    assert num_computed(harness, since) == len(follow_up) - 27


@pytest.mark.parametrize("num_listed", [1, 2, 20])
@pytest.mark.parametrize("kept", ["nothing", "kv", "fewer alternatives", "routes"])
@pytest.mark.parametrize("frame_delay", [0, 3])
def test_requests_that_come_together_share_one_pass_over_what_they_share(
    num_listed: int, kept: str, frame_delay: int
) -> None:
    harness = make_harness(2, num_kv_blocks=400, budget=32, frame_delay=frame_delay)
    shots = make_prompt(200)
    prompts = [[*shots, *make_prompt(6, seed=1 + number)] for number in range(12)]
    if kept != "nothing":
        harness.submit("before", shots, 1, score_prompt=kept == "fewer alternatives")
        harness.run()
    if kept == "routes":
        harness.engine.evict("kv")
    since = len(harness.engine._workers.steps)
    for number, prompt in enumerate(prompts):
        harness.submit(
            f"r{number}", prompt, 0, score_prompt=True, num_prompt_alternatives=num_listed
        )
    harness.run()
    for number, prompt in enumerate(prompts):
        assert_listed(harness.generations[f"r{number}"], prompt, num_listed)
    assert num_computed_by_all(harness, since) <= 2 * len(shots) + 12 * 7


def num_computed_by_all(harness: EngineHarness, since: int) -> int:
    steps = harness.engine._workers.steps[since:]
    return sum(sum((*s.gate_tokens.values(), *s.replayed_tokens.values())) for s in steps)


def test_only_who_asks_for_the_same_scores_waits_for_them_and_nobody_for_later_ones() -> None:
    harness = make_harness(num_kv_blocks=400, budget=16)
    shots = make_prompt(100)
    for salt in (None, "s"):
        harness.submit(f"before {salt}", shots, 1, cache_salt=salt)
    harness.run()
    asks = {
        "first": {},
        "the same": {},
        "fewer": {"num_prompt_alternatives": 1},
        "another salt": {"cache_salt": "s"},
        "urgent": {"priority": -1},
        "no scores": {"score_prompt": False},
    }
    five = {"score_prompt": True, "num_prompt_alternatives": 5}
    for name, fields in asks.items():
        harness.submit(name, [*shots, 1, 2], 9, **(five | fields))
        harness.step()
    waiting = {request.request_id for request in harness.scheduler.waiting}
    assert waiting == {"the same"}
    harness.run()


def test_prompt_scores_are_told_before_the_completion_and_once() -> None:
    harness = make_harness(budget=4, frame_delay=2)
    prompt = make_prompt(13)
    harness.submit("r", prompt, 6, score_prompt=True)
    generation = harness.generations["r"]
    while generation.completion is None:
        harness.step()
    assert prompt_scores(generation) == expected_scores(prompt, 6)[:12]


def test_a_request_that_is_aborted_while_it_is_scored_is_told_nothing() -> None:
    harness = make_harness(budget=4, frame_delay=2)
    harness.submit("r", make_prompt(13), 0, score_prompt=True)
    harness.step()
    harness.engine.abort(CLIENT, "r")
    harness.run()
    assert harness.generations["r"].prompt_scores is None


@pytest.mark.parametrize("frame_delay", [0, 2])
def test_a_preempted_request_scores_what_it_had_not_scored(frame_delay: int) -> None:
    harness = make_harness(num_kv_blocks=9, budget=4, frame_delay=frame_delay)
    older, younger = make_prompt(8, seed=1), make_prompt(14, seed=2)
    harness.submit("older", older, 24, score_prompt=True)
    harness.submit("younger", younger, 8, score_prompt=True)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    for name, prompt, max_tokens in (("older", older, 24), ("younger", younger, 8)):
        generation = harness.generations[name]
        expected = expected_scores(prompt, max_tokens)
        assert prompt_scores(generation) == expected[: len(prompt) - 1]
        assert scores_of(generation) == expected[len(prompt) - 1 :]


def test_without_the_store_scores_are_computed_each_time() -> None:
    harness = make_harness()
    harness.engine.set_features(prefix_store=False)
    prompt = make_prompt(20)
    for name in ("first", "second"):
        assert prompt_scores(ask(harness, name, prompt, 2)) == expected_scores(prompt, 2)[:19]
    assert harness.store.stats().score_bytes == 0


def test_random_traffic_with_evictions_never_gives_another_score() -> None:
    assert sum(serve_and_compare(random.Random(seed)) for seed in range(8)) > 0, "no preemption"


def serve_and_compare(rng: random.Random) -> int:
    """Returns how often a request was preempted."""
    harness = make_harness(
        rng.choice([1, 2]),
        num_kv_blocks=rng.choice([12, 16, 40]),
        budget=rng.choice([3, 16]),
        frame_delay=rng.choice([0, 2]),
    )
    stems = [make_prompt(rng.randrange(1, 30), seed=50 + i) for i in range(3)]
    asked: dict[str, tuple[list[int], int, int]] = {}
    for number in range(40):
        stem = rng.choice(stems)
        prompt = [*stem[: rng.randrange(1, len(stem) + 1)], *make_prompt(rng.randrange(9), number)]
        scored, max_tokens = rng.random() < 0.6, rng.randrange(12)
        num_listed = rng.choice([1, 1, 2, 3, 5])
        harness.submit(
            f"r{number}",
            prompt,
            max_tokens,
            score_prompt=scored,
            num_prompt_alternatives=num_listed,
        )
        if scored:
            asked[f"r{number}"] = prompt, max_tokens, num_listed
        for _ in range(rng.randrange(4)):
            if harness.engine.has_work:
                harness.step()
        if rng.random() < 0.15:
            harness.engine.evict(rng.choice(["kv", "scores", "routes"]))
        harness.store.check_invariants()
    harness.run()
    for name, (prompt, max_tokens, num_listed) in asked.items():
        expected = expected_scores(prompt, max(max_tokens, 1))
        assert_listed(harness.generations[name], prompt, num_listed)
        if max_tokens:
            assert scores_of(harness.generations[name]) == expected[len(prompt) - 1 :]
    return harness.scheduler.num_preemptions
