"""A thousand requests that end before their time, in whatever phase they are: nothing of them stays."""

import random

import pytest

from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt, read_metrics
from tests.helpers.engines import CLIENT, EngineHarness

NUM_ABORTED = 1000
NUM_RANKS = 2
BLOCK_SIZE = 4
CONVERSATIONS = [make_prompt(40, seed=seed) for seed in range(6)]


def phase_of(harness: EngineHarness, request_id: str) -> str:
    """Where a request is when it is aborted."""
    request = harness.engine._requests[CLIENT, request_id]
    if request.finish_reason is not None:
        return "finishing"
    if request.home_rank is None:
        return "preempted" if request.was_admitted else "waiting"
    if request.num_output_tokens:
        return "decode"
    return "prefill" if request.num_computed_tokens else "admitted"


def submit_random(harness: EngineHarness, random_: random.Random, number: int) -> list[str]:
    """One request or the choices of one, of a prompt that shares its beginning with others."""
    stem = CONVERSATIONS[random_.randrange(len(CONVERSATIONS))]
    prompt = [*stem[: random_.randrange(1, 41)], *make_prompt(random_.randrange(1, 9), number)]
    fields = {
        "score_prompt": random_.random() < 0.3,
        "recompute_prompt": random_.random() < 0.2,
        "num_prompt_alternatives": random_.choice([1, 3]),
        "priority": random_.choice([0, 0, 1]),
    }
    leader = f"r{number}"
    harness.submit(leader, prompt, random_.randrange(1, 25), **fields)
    if random_.random() < 0.7:
        return [leader]
    harness.submit(f"{leader}-1", prompt, 5, choice=1, leader_id=leader)
    return [leader, f"{leader}-1"]


@pytest.mark.parametrize("frame_delay", [0, 3])
def test_a_thousand_aborts_in_random_phases_leave_everything_as_it_was(frame_delay: int) -> None:
    random_ = random.Random(31 + frame_delay)
    harness = make_harness(
        num_ranks=NUM_RANKS, budget=12, num_kv_blocks=40, max_num_seqs=6, frame_delay=frame_delay
    )
    free_at_start = harness.store.stats().kv_blocks_free
    under_way: list[str] = []
    phases: dict[str, int] = {}
    num_submitted = num_aborted = 0
    while num_aborted < NUM_ABORTED:
        while len(under_way) < 12:
            under_way += submit_random(harness, random_, num_submitted)
            num_submitted += 1
        for _ in range(random_.randrange(4)):
            harness.step()
        under_way = [r for r in under_way if harness.generations[r].completion is None]
        for request_id in random_.sample(under_way, min(len(under_way), random_.randrange(5))):
            phase = phase_of(harness, request_id)
            phases[phase] = phases.get(phase, 0) + 1
            harness.engine.abort(CLIENT, request_id)
            under_way.remove(request_id)
            num_aborted += 1
    for request_id in under_way:
        harness.engine.abort(CLIENT, request_id)
    harness.run()

    assert {"waiting", "admitted", "prefill", "decode", "preempted"} <= set(phases), phases
    assert frame_delay == 0 or "finishing" in phases
    assert harness.engine.num_running == harness.engine.num_waiting == 0
    assert harness.engine._workers.sequences == set()
    assert harness.store.stats().kv_blocks_leased == 0
    sample = read_metrics(harness)
    assert sample("requests_finished_total")["abort"] == num_aborted + len(under_way)
    harness.store.check_invariants()
    harness.engine.evict("all")
    assert harness.store.stats().kv_blocks_used == (0,) * NUM_RANKS
    assert harness.store.stats().kv_blocks_free == free_at_start
    assert harness.store.stats().num_nodes == 0
    assert_undisturbed(harness.generate("last", CONVERSATIONS[0], 9), CONVERSATIONS[0], 9)


def test_an_aborted_request_is_in_no_later_step_of_any_rank() -> None:
    """The workers refuse a step that names a sequence which they were told to end."""
    harness = make_harness(num_ranks=NUM_RANKS, budget=8)
    prompts = {f"r{number}": make_prompt(20, seed=number) for number in range(6)}
    for request_id, prompt in prompts.items():
        harness.submit(request_id, prompt, 30)
    for _ in range(8):
        harness.step()
    gone = {request_id: harness.engine._requests[CLIENT, request_id] for request_id in ("r0", "r3")}
    homes = {request.home_rank for request in gone.values()}
    num_sequences = len(harness.engine._workers.sequences)
    for request_id in gone:
        harness.engine.abort(CLIENT, request_id)
    assert homes == {0, 1}
    assert len(harness.engine._workers.sequences) == num_sequences - 2
    harness.run()
    for request_id in prompts.keys() - gone.keys():
        assert_undisturbed(harness.generations[request_id], prompts[request_id], 30)
