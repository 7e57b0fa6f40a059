"""Ranks die in the middle of traffic: what clients get is what they would have got."""

import random

import pytest

from cluster.errors import RankLostError
from cluster.types import Rank
from router_service.suspects import BREAKS_RANKS
from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt, read_metrics
from tests.helpers.content_workers import ContentWorkers, score_oracle
from tests.helpers.engines import EngineHarness
from tests.helpers.planned_engine import make_planned_cell

NUM_RANKS = 4
NUM_REQUESTS = 60
CONVERSATIONS = [make_prompt(40, seed=seed) for seed in range(4)]


def kill(
    harness: EngineHarness, workers: ContentWorkers, ranks: list[int], rng: random.Random
) -> int:
    """In a step, if there is one to run, or between two. Returns how many requests were placed anew.

    Not in the step that a request is given alone after two that broke: it would be to blame.
    """
    workers.dead_rank, workers.does_share = ranks[0], rng.random() < 0.5
    in_step = rng.choice([False, True]) and harness.engine._suspects.alone is None
    for _ in range(in_step):
        try:
            harness.engine.step()
        except RankLostError:
            break
    workers.dead_rank = None
    harness.engine.discard_step()
    for rank in ranks:
        workers.lose_rank(rank, rng.randrange(3))
    lost = harness.engine.lose_ranks([Rank(rank) for rank in ranks])
    harness.collect()
    harness.store.check_invariants()
    for rank in ranks:
        used = harness.store.stats().kv_blocks_used[rank]
        assert used == 0, f"{used} blocks of rank {rank} outlive it"
    return lost.num_requests


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("frame_delay", [0, 3])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_requests_go_on_token_for_token_and_route_for_route_when_ranks_die(
    seed: int, frame_delay: int, planned: bool
) -> None:
    rng = random.Random(1000 * seed + 10 * frame_delay + planned)
    options = {"num_ranks": NUM_RANKS, "budget": 12, "num_kv_blocks": 40, "max_num_seqs": 6}
    if planned:
        harness = make_planned_cell(rng=rng, max_looks=2, **options).harness
    else:
        harness = make_harness(frame_delay=frame_delay, **options)
    workers = harness.engine._workers
    assert isinstance(workers, ContentWorkers)
    workers.frame_delay = frame_delay
    wanted: dict[str, tuple[list[int], int]] = {}
    num_moved = num_kills = 0
    while len(wanted) < NUM_REQUESTS or harness.engine.has_work:
        if len(wanted) < NUM_REQUESTS:
            stem = rng.choice(CONVERSATIONS)[: rng.randrange(1, 41)]
            prompt = [*stem, *make_prompt(rng.randrange(1, 9), len(wanted))]
            request_id, max_tokens = f"r{len(wanted)}", rng.randrange(1, 25)
            wanted[request_id] = prompt, max_tokens
            harness.submit(
                request_id,
                prompt,
                max_tokens,
                score_prompt=rng.random() < 0.3,
                recompute_prompt=rng.random() < 0.2,
            )
        for _ in range(rng.randrange(4)):
            if harness.engine.has_work:
                harness.step()
        if rng.random() < 0.2:
            ranks = rng.sample(range(NUM_RANKS), rng.choice([1, 1, 2]))
            num_moved += kill(harness, workers, ranks, rng)
            num_kills += 1

    assert num_kills > 5
    assert num_moved > 0
    for request_id, (prompt, max_tokens) in wanted.items():
        generation = harness.generations[request_id]
        assert_undisturbed(generation, prompt, max_tokens)
        if generation.prompt_scores is not None:
            expected = score_oracle(prompt)
            assert generation.prompt_scores.chosen_logprobs.tolist() == [s[0] for s in expected]
    harness.engine.check_invariants()
    assert workers.sequences == set()


def test_a_request_that_had_ended_still_gets_the_routes_that_were_lost_with_its_rank() -> None:
    harness = make_harness(num_ranks=2, frame_delay=1000)
    workers = harness.engine._workers
    assert isinstance(workers, ContentWorkers)
    prompt = make_prompt(21)
    harness.submit("r", prompt, 3)
    while harness.engine._requests and not harness.engine._finishing:
        harness.engine.step()
    (request,) = harness.engine._finishing
    assert request.num_pending_frames
    assert request.home_rank is not None
    rank = request.home_rank

    workers.lose_rank(rank, 0)
    lost = harness.engine.lose_ranks([rank])
    harness.run()

    assert (lost.num_requests, lost.num_routed_tokens, lost.num_unrouted_tokens) == (1, 0, 24)
    assert_undisturbed(harness.generations["r"], prompt, 3)
    assert read_metrics(harness)("requests_finished_total")["length"] == 1


def test_a_request_that_had_ended_and_misses_nothing_ends_at_once() -> None:
    harness = make_harness(num_ranks=2, frame_delay=1000)
    workers = harness.engine._workers
    assert isinstance(workers, ContentWorkers)
    prompt = make_prompt(21)
    harness.submit("r", prompt, 3, return_routes=False)
    while not harness.engine._finishing:
        harness.engine.step()
    (request,) = harness.engine._finishing
    assert request.home_rank is not None
    num_steps = len(workers.steps)

    workers.lose_rank(request.home_rank, 0)
    harness.engine.lose_ranks([request.home_rank])
    harness.collect()

    assert harness.generations["r"].completion is not None
    assert len(workers.steps) == num_steps
    assert not harness.engine.has_work


def test_other_ranks_keep_their_kv_and_the_lost_one_is_replayed() -> None:
    harness = make_harness(num_ranks=2, num_kv_blocks=64)
    workers = harness.engine._workers
    assert isinstance(workers, ContentWorkers)
    prompts = {f"r{i}": make_prompt(33, seed=i) for i in range(2)}
    for request_id, prompt in prompts.items():
        harness.submit(request_id, prompt, 20)
    for _ in range(12):
        harness.step()
    homes = {r.request_id: r.home_rank for r in harness.engine._requests.values()}
    assert set(homes.values()) == {0, 1}
    workers.steps.clear()
    num_told = sum(len(generation.token_ids) for generation in harness.generations.values())

    workers.lose_rank(0, 0)
    lost = harness.engine.lose_ranks([Rank(0)])
    harness.run()

    assert lost.num_requests == 1
    for request_id, prompt in prompts.items():
        assert_undisturbed(harness.generations[request_id], prompt, 20)
    replayed = sum(sum(step.replayed_tokens.values()) for step in workers.steps)
    assert replayed == lost.num_routed_tokens
    gate = sum(sum(step.gate_tokens.values()) for step in workers.steps)
    # the last known token of each was an input only then: of the lost one it is among those without routes
    assert gate == lost.num_unrouted_tokens + 2 * 20 - num_told - 1


def run_and_count_breaks(harness: EngineHarness, workers: ContentWorkers) -> int:
    """Rank 0 is lost with every step that breaks, and comes back."""
    num_breaks = 0
    while harness.engine.has_work:
        try:
            harness.step()
        except RankLostError:
            num_breaks += 1
            harness.engine.discard_step()
            workers.lose_rank(0, 0)
            harness.engine.lose_ranks([Rank(0)])
            harness.collect()
        assert num_breaks < 50
    return num_breaks


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("breakers", [[3], [0], [2, 5], [0, 1]])
def test_requests_that_break_every_step_end_and_nobody_else_does(
    breakers: list[int], planned: bool
) -> None:
    options = {"num_ranks": 2, "budget": 12, "num_kv_blocks": 64, "max_num_seqs": 6}
    if planned:
        harness = make_planned_cell(rng=random.Random(1), max_looks=2, **options).harness
    else:
        harness = make_harness(**options)
    workers = harness.engine._workers
    assert isinstance(workers, ContentWorkers)
    prompts = {f"r{n}": make_prompt(21, seed=n) for n in range(8)}
    for request_id, prompt in prompts.items():
        harness.submit(request_id, prompt, 20)
    for _ in range(8):
        harness.step()
    workers.breakers = set(breakers)

    assert run_and_count_breaks(harness, workers) <= 3 * len(breakers)

    for number, (request_id, prompt) in enumerate(prompts.items()):
        completion = harness.generations[request_id].completion
        assert completion is not None
        if number in breakers:
            assert (completion.finish_reason, completion.error) == ("error", BREAKS_RANKS)
        else:
            assert_undisturbed(harness.generations[request_id], prompt, 20)
    harness.engine.check_invariants()
    assert workers.sequences == set()


def test_a_request_that_breaks_alone_in_the_cell_is_ended_too() -> None:
    harness = make_harness(num_ranks=2)
    workers = harness.engine._workers
    assert isinstance(workers, ContentWorkers)
    workers.breakers = {0}
    harness.submit("r", make_prompt(21), 3)

    assert run_and_count_breaks(harness, workers) == 3

    completion = harness.generations["r"].completion
    assert completion is not None
    assert completion.error == BREAKS_RANKS
    harness.engine.check_invariants()
