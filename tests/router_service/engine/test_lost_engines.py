"""An engine goes on with answers that another one had begun: what clients get is what they would have got."""

import random

import numpy as np
import pytest

from cluster.errors import RequestError
from cluster.messages import PromptSources
from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt, read_metrics
from tests.helpers.content_workers import oracle, score_oracle
from tests.helpers.engines import CLIENT, EngineHarness, Generation
from tests.helpers.lost_engines import go_on, told_until
from tests.router_service.engine.test_scores import prompt_scores, scores_of

PROMPT = make_prompt(21)
MAX_TOKENS = 9
OUTPUT = oracle(PROMPT, MAX_TOKENS)[0]


def assert_scored(generation: Generation) -> None:
    expected = score_oracle([*PROMPT, *generation.token_ids])
    assert prompt_scores(generation) == expected[: len(PROMPT) - 1]
    assert scores_of(generation) == expected[len(PROMPT) - 1 :]


@pytest.mark.parametrize("frame_delay", [0, 3, 1000])
@pytest.mark.parametrize("num_told", range(MAX_TOKENS + 1))
def test_an_answer_goes_on_behind_any_token_with_its_routes_and_scores(
    num_told: int, frame_delay: int
) -> None:
    first = make_harness(frame_delay=frame_delay, route_bytes_per_step=40)
    first.submit("r", PROMPT, MAX_TOKENS, score_prompt=True)
    told = told_until(first, "r", num_told)
    second = make_harness(num_ranks=2, budget=7)
    go_on(second, "r", PROMPT, MAX_TOKENS, told, score_prompt=True)
    second.run()
    assert_undisturbed(told, PROMPT, MAX_TOKENS)
    assert_scored(told)


@pytest.mark.parametrize("num_told", [2, 3, 5])
def test_it_ends_with_its_stop_id_also_where_that_was_the_last_thing_told(num_told: int) -> None:
    fields = {"stop_token_ids": (OUTPUT[4],)}
    first = make_harness(frame_delay=1000)
    first.submit("r", PROMPT, MAX_TOKENS, **fields)
    told = told_until(first, "r", num_told)
    second = make_harness()
    go_on(second, "r", PROMPT, MAX_TOKENS, told, **fields)
    second.run()
    assert told.completion is not None
    assert (told.completion.finish_reason, told.completion.num_output_tokens) == ("stop", 5)
    assert told.token_ids == OUTPUT[:5]
    np.testing.assert_array_equal(told.routes.topk_ids, oracle(PROMPT, 5)[1])


def test_one_of_which_all_was_told_ends_without_a_step() -> None:
    harness = make_harness()
    told = Generation(list(OUTPUT), prompt_sources=PromptSources(4, 8))
    go_on(harness, "r", PROMPT, MAX_TOKENS, told, return_routes=False)
    harness.run()
    assert harness.engine._workers.steps == []
    assert told.completion is not None
    assert (told.completion.finish_reason, told.completion.num_output_tokens) == ("length", 9)
    assert (told.completion.cached_tokens, told.completion.replayed_tokens) == (4, 8)


def test_a_stop_string_is_cut_off_where_it_is_counted_from_the_first_token() -> None:
    harness = make_harness()
    told = Generation(OUTPUT[:4])
    go_on(harness, "r", PROMPT, MAX_TOKENS, told, return_routes=False)
    told_until(harness, "r", 7)
    harness.engine.finish(CLIENT, "r", 6)
    harness.run()
    assert told.completion is not None
    assert (told.completion.finish_reason, told.completion.num_output_tokens) == ("stop", 6)


@pytest.mark.parametrize("num_steps", [0, 2])
def test_one_that_is_stopped_before_its_routes_are_there_again_waits_for_them(
    num_steps: int,
) -> None:
    harness = make_harness(budget=4)
    told = Generation(OUTPUT[:6], num_prompt_tokens=len(PROMPT))
    go_on(harness, "r", PROMPT, MAX_TOKENS, told)
    for _ in range(num_steps):
        harness.step()
    harness.engine.finish(CLIENT, "r", 5)
    harness.run()
    assert told.completion is not None
    assert (told.completion.finish_reason, told.completion.num_output_tokens) == ("stop", 5)
    assert told.token_ids == OUTPUT[:6]
    np.testing.assert_array_equal(told.routes.topk_ids, oracle(PROMPT, 5)[1])


def test_where_the_prompt_came_from_stays_what_the_first_engine_said() -> None:
    first = make_harness()
    first.generate("before", PROMPT, 1)
    first.submit("r", PROMPT, MAX_TOKENS)
    told = told_until(first, "r", 3)
    second = make_harness()
    go_on(second, "r", PROMPT, MAX_TOKENS, told)
    second.run()
    assert told.completion is not None
    assert (told.completion.cached_tokens, told.completion.replayed_tokens) == (20, 0)
    metric = read_metrics(second)
    assert sum(metric("prompt_tokens_total").values()) == 0, "counted by both engines"
    assert metric("generation_tokens_total") == {"": MAX_TOKENS - 3}
    assert metric("time_to_first_token_seconds_count") == {"": 0}
    assert metric("inter_token_latency_seconds_count") == {"": MAX_TOKENS - 3}


@pytest.mark.parametrize("num_told", [1, 6])
def test_told_tokens_that_the_store_has_are_not_prompt_tokens(num_told: int) -> None:
    harness = make_harness()
    harness.generate("before", [*PROMPT[:3], *PROMPT], 1)
    told = Generation(PROMPT[:num_told])
    go_on(harness, "r", [*PROMPT[:3]], 20, told, return_routes=False)
    harness.run()
    assert told.completion is not None
    assert told.completion.cached_tokens <= 3
    assert min(read_metrics(harness)("prompt_tokens_total").values()) >= 0


def test_scores_of_told_tokens_are_unknown_to_the_store_and_computed_for_who_asks() -> None:
    harness = make_harness()
    told = Generation(OUTPUT[:6], num_prompt_tokens=len(PROMPT))
    go_on(harness, "r", PROMPT, MAX_TOKENS, told, return_routes=False)
    harness.run()
    known = [*PROMPT, *OUTPUT]
    harness.submit("reader", known, 3, score_prompt=True)
    harness.run()
    assert prompt_scores(harness.generations["reader"]) == score_oracle(known)
    assert_undisturbed(harness.generations["reader"], known, 3)


def test_it_replays_routes_that_the_store_has_of_prompt_and_told_tokens() -> None:
    harness = make_harness()
    harness.generate("before", [*PROMPT, *OUTPUT[:6]], 1)
    harness.engine.evict("kv")
    harness.engine._workers.steps.clear()
    told = Generation(OUTPUT[:6], num_prompt_tokens=len(PROMPT))
    go_on(harness, "r", PROMPT, MAX_TOKENS, told)
    harness.run()
    assert_undisturbed(told, PROMPT, MAX_TOKENS)
    steps = harness.engine._workers.steps
    assert sum(step.replayed_tokens[0] for step in steps) == 24


def submit_choices(harness: EngineHarness, num_choices: int) -> list[str]:
    ids = [f"r-{choice}" for choice in range(num_choices)]
    for choice, request_id in enumerate(ids):
        max_tokens, leader_id = MAX_TOKENS - 3 + choice, ids[0] if choice else None
        harness.submit(request_id, PROMPT, max_tokens, choice=choice, leader_id=leader_id)
    return ids


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("num_steps", range(0, 16, 3))
def test_choices_go_on_whether_or_not_the_first_one_has_ended(
    num_steps: int, num_ranks: int
) -> None:
    first = make_harness(budget=16)
    ids = submit_choices(first, 4)
    for _ in range(num_steps):
        first.step()
    second = make_harness(num_ranks, frame_delay=1)
    left = [i for i in ids if first.generations[i].completion is None]
    for request_id in left:
        choice = ids.index(request_id)
        leader_id = ids[0] if choice and ids[0] in left else None
        told = first.generations[request_id]
        fields = {"choice": choice, "leader_id": leader_id}
        go_on(second, request_id, PROMPT, MAX_TOKENS - 3 + choice, told, **fields)
    second.run()
    for choice, request_id in enumerate(ids):
        assert_undisturbed(first.generations[request_id], PROMPT, MAX_TOKENS - 3 + choice)


@pytest.mark.parametrize("seed", range(6))
def test_whole_traffic_moves_from_engine_to_engine_with_few_blocks(seed: int) -> None:
    rng = random.Random(seed)
    wanted: dict[str, tuple[list[int], int, bool]] = {}
    open_answers: dict[str, Generation] = {}
    done: dict[str, Generation] = {}
    stems = [make_prompt(24, number) for number in range(2)]
    for life in range(5):
        harness = make_harness(
            rng.choice([1, 2]), num_kv_blocks=14, budget=8, frame_delay=rng.choice([0, 2])
        )
        for request_id, told in open_answers.items():
            prompt, max_tokens, scored = wanted[request_id]
            go_on(harness, request_id, prompt, max_tokens, told, score_prompt=scored)
        for number in range(6):
            request_id = f"r{life}-{number}"
            prompt = [*rng.choice(stems)[: rng.randrange(1, 25)], *make_prompt(3, number)]
            wanted[request_id] = prompt, rng.randrange(1, 20), rng.random() < 0.4
            harness.submit(request_id, *wanted[request_id][:2], score_prompt=wanted[request_id][2])
        for _ in range(rng.randrange(5, 40)):
            if harness.engine.has_work:
                harness.step()
        if life == 4:
            harness.run()
        harness.store.check_invariants()
        done |= {i: g for i, g in harness.generations.items() if g.completion is not None}
        open_answers = {i: g for i, g in harness.generations.items() if g.completion is None}
    assert len(done) == 30
    for request_id, (prompt, max_tokens, scored) in wanted.items():
        assert_undisturbed(done[request_id], prompt, max_tokens)
        if scored:
            assert prompt_scores(done[request_id]) == score_oracle(prompt)


@pytest.mark.parametrize("num_told", [0, 2])
def test_an_answer_that_was_begun_elsewhere_is_not_one_of_other_weights(num_told: int) -> None:
    harness = make_harness()
    streamed = Generation(OUTPUT[:num_told])
    go_on(harness, "streamed", PROMPT, MAX_TOKENS, streamed, is_streamed=True)
    whole = Generation(OUTPUT[:num_told])
    go_on(harness, "whole", PROMPT, MAX_TOKENS, whole)
    harness.submit("fresh", PROMPT, 2)
    exchange = harness.engine.exchange_weights("others", restart=True)
    harness.collect()
    assert (exchange.num_aborted, exchange.num_restarted) == (1, 1)
    assert streamed.completion is not None
    assert not streamed.completion.again
    assert whole.completion is not None
    assert whole.completion.again
    assert harness.generations["fresh"].completion is None


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"output_token_ids": np.arange(10, dtype=np.int32)}, "10 output_token_ids with max_to"),
        ({"output_token_ids": np.array([3, -1], np.int32)}, "output_token_ids hold -1"),
        ({"output_token_ids": np.array([2**17], np.int32)}, "output_token_ids hold 131072"),
        ({"output_token_ids": np.array([1], np.int64)}, "dtype int64"),
        ({"output_token_ids": np.zeros((1, 2), np.int32)}, r"shape \[1, 2\]"),
        ({"prompt_sources": PromptSources(20, 2)}, "20 cached and 2 replayed tokens"),
        ({"prompt_sources": PromptSources(-1, 2)}, "-1 cached"),
    ],
)
def test_what_no_engine_can_have_told_is_refused(fields: dict[str, object], why: str) -> None:
    harness = make_harness()
    with pytest.raises(RequestError, match=why):
        harness.submit("r", PROMPT, MAX_TOKENS, **fields)
    assert not harness.engine.has_work


def test_known_tokens_of_what_goes_on_are_counted_and_told_by_whether_they_have_routes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = make_harness()
    harness.submit("before", PROMPT, MAX_TOKENS)
    harness.run()
    harness.engine.evict("kv")
    told = Generation(OUTPUT[:5], prompt_sources=PromptSources(0, 0))
    go_on(harness, "r", PROMPT, MAX_TOKENS, told, return_routes=False)
    harness.run()
    num_routed = (len(PROMPT) + 5) // 4 * 4  # whole blocks
    assert read_metrics(harness)("recovered_tokens_total") == {
        "replayed": num_routed,
        "computed": len(PROMPT) + 5 - num_routed,
    }
    assert read_metrics(harness)("recovered_requests_total") == {"rank": 0, "engine": 1}
    (line,) = [r.getMessage() for r in caplog.records if "engine before" in r.getMessage()]
    num_unrouted = len(PROMPT) + 5 - num_routed
    assert f"routed_tokens={num_routed} unrouted_tokens={num_unrouted}" in line
    assert " requests=1 " in line
