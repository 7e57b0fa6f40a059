"""Requests that share a prefix while it is being computed."""

import pytest

from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt
from tests.helpers.engines import CLIENT


def test_a_burst_with_one_prefix_computes_it_once_per_rank_and_spreads_evenly() -> None:
    harness = make_harness(4, num_kv_blocks=400, budget=64, max_num_seqs=64)
    prefix = make_prompt(400)
    prompts = [[*prefix, *make_prompt(9, seed=i + 1)] for i in range(64)]
    for i, prompt in enumerate(prompts):
        harness.submit(f"r{i}", prompt, 8)
    harness.run()
    for i, prompt in enumerate(prompts):
        assert_undisturbed(harness.generations[f"r{i}"], prompt, 8)
    steps = harness.engine._workers.steps
    gate = [sum(s.gate_tokens[rank] for s in steps) for rank in range(4)]
    replayed = [sum(s.replayed_tokens[rank] for s in steps) for rank in range(4)]
    assert sorted(replayed) == [0, 400, 400, 400]
    assert sum(gate) == 400 + 64 * 9 + 64 * 7
    totals = [g + r for g, r in zip(gate, replayed, strict=True)]
    assert max(totals) / (sum(totals) / 4) <= 1.3


def test_requests_that_arrive_while_their_prefix_is_computed_wait_for_it() -> None:
    harness = make_harness(2, budget=8, num_kv_blocks=100)
    prompt = make_prompt(41)
    harness.submit("first", prompt, 3)
    harness.step()
    harness.submit("second", prompt, 3)
    harness.run()
    assert (
        harness.generations["second"].completion.replayed_tokens
        + (harness.generations["second"].completion.cached_tokens)
        == 40
    )
    assert_undisturbed(harness.generations["second"], prompt, 3)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("second", "num_tokens"),
    [
        ({"tenant": "b", "cache_salt": "s"}, 1),
        ({"tenant": None, "cache_salt": "s"}, 1),
        ({"tenant": "a", "cache_salt": "t"}, 1),
        ({"tenant": "a", "cache_salt": None}, 1),
        ({"tenant": "a", "cache_salt": "s"}, 0),
    ],
)
def test_only_the_same_tenant_and_salt_wait_for_a_prefix_that_is_being_computed(
    second: dict[str, str | None], num_tokens: int, num_ranks: int
) -> None:
    harness = make_harness(num_ranks, budget=64)
    prompt = make_prompt(17)
    harness.submit("first", prompt, 3, tenant="a", cache_salt="s")
    harness.submit("second", prompt, 3, **second)
    harness.step()
    assert len(harness.generations["first"].token_ids) == 1
    assert len(harness.generations["second"].token_ids) == num_tokens
    harness.run()
    completion = harness.generations["second"].completion
    assert completion.cached_tokens + completion.replayed_tokens == 16 * (not num_tokens)
    assert_undisturbed(harness.generations["second"], prompt, 3)


def test_an_aborted_leader_leaves_its_followers_to_compute_for_themselves() -> None:
    harness = make_harness(budget=8, num_kv_blocks=100)
    prompt = make_prompt(41)
    harness.submit("leader", prompt, 3)
    harness.submit("follower", prompt, 3)
    harness.step()
    harness.engine.abort(CLIENT, "leader")
    harness.run()
    assert_undisturbed(harness.generations["follower"], prompt, 3)
