"""Routes are told as they are recorded and never many at once, so that a long prompt's do not hold up the others."""

import numpy as np
import pytest

from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt
from tests.helpers.content_workers import SHAPE, oracle
from tests.helpers.engines import CLIENT, EngineHarness

BYTES_PER_TOKEN = SHAPE.bytes_per_token
NUM_TOLD = 5
PROMPT = make_prompt(61)
MAX_TOKENS = 9


def make_bounded(**options: object) -> EngineHarness:
    """So many tokens' routes per step."""
    return make_harness(route_bytes_per_step=NUM_TOLD * BYTES_PER_TOKEN, **options)


def num_told(harness: EngineHarness) -> int:
    parts = [part for g in harness.generations.values() for part in g.route_parts]
    return sum(len(part.topk_ids) for part in parts)


@pytest.mark.parametrize("budget", [4, 16, 64])
@pytest.mark.parametrize("frame_delay", [0, 3])
def test_no_step_tells_more_than_its_bytes_and_all_arrive_in_order(
    budget: int, frame_delay: int
) -> None:
    harness = make_bounded(budget=budget, frame_delay=frame_delay)
    prompts = {"long": PROMPT, "short": make_prompt(9, seed=1), "other": make_prompt(30, seed=2)}
    for request_id, prompt in prompts.items():
        harness.submit(request_id, prompt, MAX_TOKENS)
    while harness.engine.has_work:
        before = num_told(harness)
        harness.step()
        assert num_told(harness) - before <= NUM_TOLD
    for request_id, prompt in prompts.items():
        assert_undisturbed(harness.generations[request_id], prompt, MAX_TOKENS)
    harness.engine.check_invariants()


def test_others_get_a_token_in_every_step_in_which_routes_are_told() -> None:
    harness = make_bounded(budget=64)
    harness.submit("stream", make_prompt(5, seed=3), 40, return_routes=False)
    harness.step()
    harness.submit("long", PROMPT, 1)
    while harness.generations["long"].completion is None:
        before = len(harness.generations["stream"].token_ids)
        harness.step()
        assert len(harness.generations["stream"].token_ids) == before + 1
    assert len(harness.generations["long"].route_parts) == -(-len(PROMPT) // NUM_TOLD)


def test_what_is_asked_is_told_and_nothing_else() -> None:
    harness = make_bounded()
    harness.submit("r", PROMPT, MAX_TOKENS, routes_start=17, routes_end=40)
    harness.submit("beyond", PROMPT, 2, routes_start=500)
    harness.submit("ids", PROMPT, 2, return_route_weights=False)
    harness.run()
    parts = harness.generations["r"].route_parts
    told = np.concatenate([part.topk_ids for part in parts])
    assert parts[0].start == 17
    np.testing.assert_array_equal(told, oracle(PROMPT, MAX_TOKENS)[1][17:40])
    (empty,) = harness.generations["beyond"].route_parts
    assert empty.topk_ids.shape == (0, SHAPE.num_moe_layers, SHAPE.num_experts_per_tok)
    ids = harness.generations["ids"].route_parts
    assert all(part.topk_weights is None for part in ids)
    told = np.concatenate([part.topk_ids for part in ids])
    np.testing.assert_array_equal(told, oracle(PROMPT, 2)[1])


def test_routes_from_the_store_and_of_a_preempted_request_are_told_once() -> None:
    harness = make_bounded(budget=8, num_kv_blocks=24)
    for number in range(4):
        harness.submit(f"r{number}", make_prompt(20 + number), 30)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    harness.engine.evict("kv")
    harness.submit("again", make_prompt(23), 30)
    harness.run()
    for number in range(4):
        assert_undisturbed(harness.generations[f"r{number}"], make_prompt(20 + number), 30)
    assert_undisturbed(harness.generations["again"], make_prompt(23), 30)


def test_a_request_that_is_left_while_its_routes_are_told_leaves_nothing() -> None:
    harness = make_bounded(budget=64)
    harness.submit("r", PROMPT, 1)
    for _ in range(4):
        harness.step()
    assert harness.generations["r"].route_parts
    assert harness.generations["r"].completion is None
    harness.engine.abort(CLIENT, "r")
    assert not harness.engine.has_work
    harness.engine.check_invariants()
    harness.step()
    assert num_told(harness) < len(PROMPT)
