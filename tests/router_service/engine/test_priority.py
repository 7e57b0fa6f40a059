"""Lower priority numbers go first, in the queue and when blocks run out; first come, first served among equals."""

import pytest

from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt
from tests.helpers.engines import EngineHarness

PRIORITIES = {"a": 0, "b": 5, "c": -2, "d": 5, "e": 0, "f": -2}


def order_of_first_tokens(harness: EngineHarness) -> list[str]:
    """Request ids by when they had their first token."""
    seen: list[str] = []
    while harness.engine.has_work:
        harness.step()
        seen += [r for r, g in harness.generations.items() if g.token_ids and r not in seen]
    return seen


def test_the_queue_is_served_by_priority_and_by_arrival_within_one() -> None:
    harness = make_harness(max_num_seqs=1)
    for number, (request_id, priority) in enumerate(PRIORITIES.items()):
        harness.submit(request_id, make_prompt(5, seed=number), 2, priority=priority)
    assert order_of_first_tokens(harness) == ["c", "f", "a", "e", "b", "d"]
    harness.engine.check_invariants()


def test_a_running_request_is_not_stopped_for_one_that_waits() -> None:
    harness = make_harness(max_num_seqs=1)
    harness.submit("running", make_prompt(5), 6, priority=9)
    harness.step()
    harness.submit("first", make_prompt(5, seed=1), 2, priority=-9)
    harness.submit("later", make_prompt(5, seed=2), 2)
    harness.run()
    assert harness.scheduler.num_preemptions == 0
    assert_undisturbed(harness.generations["running"], make_prompt(5), 6)


def test_the_token_budget_goes_to_the_lower_number_first() -> None:
    harness = make_harness(budget=8)
    harness.submit("background", make_prompt(40), 2, priority=1)
    harness.step()
    harness.submit("urgent", make_prompt(40, seed=1), 2)
    seen = order_of_first_tokens(harness)
    assert seen == ["urgent", "background"]


@pytest.mark.parametrize("priority", [1, -1])
def test_the_highest_number_gives_up_its_blocks_whenever_it_came(priority: int) -> None:
    harness = make_harness(num_kv_blocks=10, budget=16)
    prompts = {"first": make_prompt(9, seed=1), "second": make_prompt(9, seed=2)}
    harness.submit("first", prompts["first"], 20, priority=priority)
    harness.submit("second", prompts["second"], 20)
    while not harness.scheduler.num_preemptions:
        harness.step()
    (preempted,) = harness.scheduler.waiting
    assert preempted.request_id == ("first" if priority > 0 else "second")
    harness.run()
    for request_id, prompt in prompts.items():
        assert_undisturbed(harness.generations[request_id], prompt, 20)


def test_a_preempted_request_waits_in_its_place_by_priority() -> None:
    harness = make_harness(num_kv_blocks=8, budget=16)
    harness.submit("keeps", make_prompt(9, seed=1), 20, priority=0)
    harness.submit("gives", make_prompt(9, seed=2), 20, priority=2)
    harness.step()
    for request_id, priority in (("after", 3), ("before", 1), ("equal", 2)):
        harness.submit(request_id, make_prompt(25, seed=priority), 4, priority=priority)
    while not harness.scheduler.num_preemptions:
        harness.step()
    waiting = [request.request_id for request in harness.scheduler.waiting]
    assert waiting == ["before", "gives", "equal", "after"]
    harness.run()


def test_nobody_waits_for_the_prefix_of_a_request_that_comes_after_it() -> None:
    """As long as others of the lower number come, the other would get no tokens."""
    harness = make_harness(budget=8, max_num_seqs=4)
    shared = make_prompt(60)
    harness.submit("background", shared, 2, priority=1)
    harness.step()
    harness.submit("urgent", shared, 2)
    for number in range(30):
        if not harness.generations["urgent"].token_ids:
            harness.submit(f"flood{number}", make_prompt(7, seed=number + 1), 1)
            harness.step()
    assert harness.generations["urgent"].token_ids
    assert not harness.generations["background"].token_ids
    harness.run()
    for request_id in ("background", "urgent"):
        assert_undisturbed(harness.generations[request_id], shared, 2)


def test_equals_that_share_a_prefix_compute_it_once_beside_one_that_comes_after_them() -> None:
    harness = make_harness(budget=16, max_num_seqs=8)
    shared = make_prompt(48)
    harness.submit("background", shared, 2, priority=1)
    harness.step()
    for number in range(4):
        harness.submit(f"r{number}", shared, 2)
    harness.run()
    cached = sum(harness.generations[f"r{n}"].completion.cached_tokens for n in range(4))
    assert cached >= 3 * 40
