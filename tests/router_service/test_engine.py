"""The engine over workers whose KV slots hold digests of all they depend on: output equals an undisturbed run."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.errors import CellError, OverloadedError, RankLostError, RequestError
from cluster.messages import SamplingParams, Submit
from tests.helpers.content_workers import (
    SHAPE,
    VOCAB,
    ContentWorkers,
    hidden_of,
    next_token,
    oracle,
    slot_content,
)
from tests.helpers.engines import CLIENT, EngineHarness, Generation


def make_harness(num_ranks: int = 1, block_size: int = 4, **options) -> EngineHarness:
    workers = ContentWorkers(num_ranks, block_size, frame_delay=options.pop("frame_delay", 0))
    return EngineHarness(workers, SHAPE, num_ranks=num_ranks, block_size=block_size, **options)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def assert_undisturbed(generation: Generation, prompt: list[int], max_tokens: int) -> None:
    tokens, routes = oracle(prompt, max_tokens)
    assert generation.token_ids == tokens
    assert generation.completion is not None
    assert generation.completion.finish_reason == "length"
    np.testing.assert_array_equal(generation.completion.topk_ids, routes)


def read_metrics(harness: EngineHarness) -> Callable[[str], dict[str, float]]:
    """Samples of one metric by the value of their label, "" without one."""
    families = list(text_string_to_metric_families(harness.metrics.render().decode()))

    def sample(name: str) -> dict[str, float]:
        samples = [s for family in families for s in family.samples]
        found = [s for s in samples if s.name == f"pointsman_{name}"]
        return {"".join(s.labels.values()): s.value for s in found}

    return sample


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


def test_an_aborted_leader_leaves_its_followers_to_compute_for_themselves() -> None:
    harness = make_harness(budget=8, num_kv_blocks=100)
    prompt = make_prompt(41)
    harness.submit("leader", prompt, 3)
    harness.submit("follower", prompt, 3)
    harness.step()
    harness.engine.abort(CLIENT, "leader")
    harness.run()
    assert_undisturbed(harness.generations["follower"], prompt, 3)


@pytest.mark.parametrize("frame_delay", [0, 3])
def test_preempted_requests_go_on_with_their_own_routes(frame_delay: int) -> None:
    harness = make_harness(num_kv_blocks=14, budget=8, frame_delay=frame_delay)
    prompts = {f"r{i}": make_prompt(9 + i, seed=i) for i in range(5)}
    for request_id, prompt in prompts.items():
        harness.submit(request_id, prompt, 20)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    for request_id, prompt in prompts.items():
        assert_undisturbed(harness.generations[request_id], prompt, 20)


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_with_few_blocks_aborts_and_evictions_stays_undisturbed(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.choice([1, 2, 4])
    harness = make_harness(
        num_ranks,
        num_kv_blocks=rng.choice([16, 24, 60]),
        budget=rng.choice([3, 8, 32]),
        max_num_seqs=rng.choice([2, 8]),
        frame_delay=rng.choice([0, 0, 2]),
    )
    stems = [make_prompt(rng.randrange(1, 30), seed=100 + i) for i in range(4)]
    alive: dict[str, tuple[list[int], int]] = {}
    for number in range(60):
        stem = rng.choice(stems)
        prompt = [
            *stem[: rng.randrange(1, len(stem) + 1)],
            *make_prompt(rng.randrange(0, 9), number),
        ]
        max_tokens = rng.randrange(1, 24)
        harness.submit(f"r{number}", prompt, max_tokens)
        alive[f"r{number}"] = (prompt, max_tokens)
        for _ in range(rng.randrange(0, 4)):
            if harness.engine.has_work:
                harness.step()
        if rng.random() < 0.15:
            victim = rng.choice(list(alive))
            if harness.generations[victim].completion is None:
                harness.engine.abort(CLIENT, victim)
                del alive[victim]
        if rng.random() < 0.1:
            harness.engine.evict(rng.choice(["kv", "routes", "all"]))
        harness.store.check_invariants()
    harness.run()
    for request_id, (prompt, max_tokens) in alive.items():
        assert_undisturbed(harness.generations[request_id], prompt, max_tokens)
    harness.engine.evict("all")
    stats = harness.store.stats()
    assert stats.num_nodes == 0
    assert all(used == 0 for used in stats.kv_blocks_used)


def test_an_abort_gives_back_blocks_and_leases_at_once() -> None:
    harness = make_harness(budget=8)
    harness.submit("gone", make_prompt(30), 30)
    harness.submit("queued", make_prompt(30), 30)
    for _ in range(6):
        harness.step()
    harness.engine.abort(CLIENT, "gone")
    harness.engine.abort(CLIENT, "queued")
    harness.engine.abort(CLIENT, "never existed")
    assert not harness.engine.has_work
    harness.engine.check_invariants()
    harness.engine.evict("all")
    assert harness.store.stats().kv_blocks_used == (0,)
    assert harness.engine._workers.sequences == set()


def test_a_stop_string_cuts_tokens_and_routes_at_the_token_that_completed_it() -> None:
    harness = make_harness()
    prompt = make_prompt(6)
    harness.submit("r", prompt, 50)
    for _ in range(8):
        harness.step()
    harness.engine.finish(CLIENT, "r", 4)
    harness.run()
    completion = harness.generations["r"].completion
    assert (completion.finish_reason, completion.num_output_tokens) == ("stop", 4)
    np.testing.assert_array_equal(completion.topk_ids, oracle(prompt, 4)[1])


def test_an_end_of_sequence_token_stops_and_counts() -> None:
    harness = make_harness()
    prompt = make_prompt(6)
    tokens, _ = oracle(prompt, 10)
    harness.submit("r", prompt, 10, stop_token_ids=(tokens[3],))
    harness.run()
    generation = harness.generations["r"]
    stop = tokens.index(tokens[3]) + 1
    assert generation.token_ids == tokens[:stop]
    assert generation.completion.finish_reason == "stop"


def test_a_poisoned_request_ends_with_an_error_and_nothing_of_it_is_stored() -> None:
    harness = make_harness(budget=64)
    harness.engine._workers.poisoned.add(0)
    prompt, healthy = make_prompt(20), make_prompt(20, seed=1)
    harness.submit("bad", prompt, 5)
    harness.submit("good", healthy, 5)
    harness.run()
    assert harness.generations["bad"].completion.finish_reason == "error"
    assert_undisturbed(harness.generations["good"], healthy, 5)
    assert harness.generate("again", prompt, 5).completion.cached_tokens == 0


def test_a_lost_rank_ends_every_request_with_one_error_that_names_it() -> None:
    harness = make_harness(2)
    for i in range(3):
        harness.submit(f"r{i}", make_prompt(20, seed=i), 5)
    harness.step()
    harness.engine._workers.dead_rank = 1
    with pytest.raises(RankLostError, match="rank 1") as lost:
        harness.step()
    harness.engine.fail_all(str(lost.value))
    harness.collect()
    for generation in harness.generations.values():
        assert generation.completion.finish_reason == "error"
        assert "rank 1" in generation.completion.error
    harness.engine.check_invariants()


def test_routes_that_never_arrive_are_an_error_that_names_the_rank() -> None:
    harness = make_harness(frame_delay=10**9)
    harness.engine._workers.route_frames = lambda timeout: []
    harness.submit("r", make_prompt(5), 1)
    harness.step()
    with pytest.raises(CellError, match="rank 0"):
        harness.step()


def test_a_full_queue_and_a_request_that_never_fits_are_refused_with_the_limit() -> None:
    harness = make_harness(max_num_waiting=1, num_kv_blocks=8)
    harness.submit("r", make_prompt(5), 1)
    with pytest.raises(OverloadedError, match="max_num_waiting"):
        harness.submit("s", make_prompt(5), 1)
    harness.run()
    with pytest.raises(RequestError, match="8: shorten"):
        harness.submit("t", make_prompt(30), 3)
    harness.submit("u", make_prompt(30), 2)
    harness.run()
    assert_undisturbed(harness.generations["u"], make_prompt(30), 2)


def test_the_engine_is_idle_when_all_is_done() -> None:
    harness = make_harness()
    harness.generate("r", make_prompt(5), 3)
    assert not harness.engine.has_work
    assert harness.engine.take_deltas() == []


def test_a_repeated_request_that_fills_the_pool_is_served_again() -> None:
    harness = make_harness(num_kv_blocks=8, budget=64)
    prompt = make_prompt(16)
    for request_id in ("first", "again"):
        assert_undisturbed(harness.generate(request_id, prompt, 16), prompt, 16)
    assert harness.scheduler.num_preemptions > 0


def test_an_id_that_is_in_use_is_refused_and_its_request_goes_on() -> None:
    harness = make_harness()
    prompt = make_prompt(9)
    harness.submit("r", prompt, 5)
    first = harness.generations["r"]
    harness.step()
    with pytest.raises(RequestError, match="'r' is in use"):
        harness.submit("r", prompt, 5)
    harness.generations["r"] = first
    harness.run()
    assert_undisturbed(first, prompt, 5)
    assert_undisturbed(harness.generate("r", prompt, 5), prompt, 5)


def test_all_requests_of_one_client_can_be_aborted_and_those_of_others_go_on() -> None:
    harness = make_harness(max_num_seqs=2)
    prompt = make_prompt(9)
    harness.submit("mine", prompt, 5)
    prompts = [np.array(make_prompt(9, seed=seed), np.int32) for seed in range(1, 6)]
    for number, other in enumerate(prompts):
        sampling = SamplingParams(5, 0.0, 1.0, None, ())
        harness.engine.submit(b"gone", Submit(f"r{number}", other, sampling, None, False))
    harness.engine.step()
    harness.engine.abort_all(b"gone")
    harness.collect()
    harness.run()
    assert_undisturbed(harness.generations["mine"], prompt, 5)
    assert harness.engine._workers.sequences == set()


def test_a_request_stopped_while_preempted_ends_with_the_tokens_that_it_had() -> None:
    harness = make_harness(num_kv_blocks=8, budget=8)
    prompts = {"old": make_prompt(9, seed=1), "young": make_prompt(9, seed=2)}
    for request_id, prompt in prompts.items():
        harness.submit(request_id, prompt, 20)
    while not (harness.scheduler.num_preemptions and harness.engine.num_waiting):
        harness.step()
    num_tokens = len(harness.generations["young"].token_ids)
    harness.engine.finish(CLIENT, "young", num_tokens)
    harness.run()
    completion = harness.generations["young"].completion
    assert (completion.finish_reason, completion.num_output_tokens) == ("stop", num_tokens)
    np.testing.assert_array_equal(completion.topk_ids, oracle(prompts["young"], num_tokens)[1])


def test_a_recorded_route_does_not_keep_the_routes_of_its_whole_step() -> None:
    harness = make_harness(budget=64)
    for number in range(3):
        harness.submit(f"r{number}", make_prompt(9, seed=number), 5)
    harness.step()
    harness.step()
    requests = [harness.engine._by_seq_id[seq_id] for seq_id in (0, 1, 2)]
    parts = [part for request in requests for part in request.route_log._parts]
    assert parts
    assert all(part.topk_ids.base is None and part.topk_weights.base is None for part in parts)


@pytest.mark.parametrize("seed", range(12))
def test_tokens_and_ends_add_up_in_the_metrics_whatever_happens(seed: int) -> None:
    rng = random.Random(1000 + seed)
    harness = make_harness(
        rng.choice([1, 2, 3]),
        num_kv_blocks=rng.choice([10, 16, 40]),
        budget=rng.choice([1, 5, 32]),
        max_num_seqs=rng.choice([1, 4]),
        frame_delay=rng.choice([0, 1, 5]),
        route_replay=rng.random() < 0.7,
    )
    prompts = [make_prompt(rng.randrange(1, 20), seed=rng.randrange(5)) for _ in range(40)]
    num_aborted, requests = 0, []
    for number, prompt in enumerate(prompts):
        harness.submit(f"r{number}", prompt, rng.randrange(1, 16))
        requests.append(harness.engine._by_seq_id[number])
        for _ in range(rng.randrange(0, 6)):
            if harness.engine.has_work:
                harness.step()
        chosen = f"r{rng.randrange(number + 1)}"
        event = rng.choice(["abort", "finish", "poison", "evict", "nothing", "nothing"])
        if event == "abort" and harness.generations[chosen].completion is None:
            harness.engine.abort(CLIENT, chosen)
            harness.generations[chosen].completion = "aborted"
            num_aborted += 1
        elif event == "finish":
            harness.engine.finish(CLIENT, chosen, len(harness.generations[chosen].token_ids))
        elif event == "poison":
            harness.engine._workers.poisoned.add(rng.randrange(number + 1))
        elif event == "evict":
            harness.engine.evict(rng.choice(["kv", "routes", "all"]))
        harness.store.check_invariants()
    harness.run()
    sample = read_metrics(harness)
    finished = sample("requests_finished_total")
    assert sum(finished.values()) == len(prompts)
    assert finished.get("abort", 0) == num_aborted
    admitted = sum(r.num_prompt_tokens for r in requests if r.was_admitted)
    assert sum(sample("prompt_tokens_total").values()) == admitted
    steps = harness.engine._workers.steps
    num_gate_tokens = sum(sum(step.gate_tokens.values()) for step in steps)
    assert sum(sample("gate_tokens_total").values()) == num_gate_tokens
    generations = harness.generations.values()
    assert all(generation.completion is not None for generation in generations)
    outputs = [len(generation.token_ids) for generation in generations]
    assert sum(sample("generation_tokens_total").values()) == sum(outputs)
    first_tokens = sample("time_to_first_token_seconds_count")
    assert sum(first_tokens.values()) == sum(map(bool, outputs))
    assert harness.engine._workers.sequences == set()
    harness.engine.evict("all")
    assert not any(harness.store.stats().kv_blocks_used)


class FickleWorkers(ContentWorkers):
    """A gate that sometimes chooses otherwise for the same token, as rounding makes a near tie do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rng = random.Random(1)

    def gate(self, hidden: bytes) -> np.ndarray:
        return super().gate(hidden + b"x" if self._rng.random() < 0.1 else hidden)


def tokens_of(prompt: list[int], output: list[int], routes: np.ndarray) -> list[int]:
    """The greedy continuation of whoever uses exactly these experts."""
    content, tokens = b"root", []
    for position, token in enumerate([*prompt, *output[:-1]]):
        content = slot_content(hidden_of(content, token), np.ascontiguousarray(routes[position]))
        if position >= len(prompt) - 1:
            tokens.append(next_token(content))
    return tokens


@pytest.mark.parametrize("route_replay", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_returned_routes_are_those_that_made_the_tokens_also_when_a_gate_is_fickle(
    seed: int, route_replay: bool
) -> None:
    rng = random.Random(2000 + seed)
    num_ranks = rng.choice([1, 2, 3])
    workers = FickleWorkers(num_ranks, 4, frame_delay=rng.choice([0, 2]))
    harness = EngineHarness(
        workers,
        SHAPE,
        num_ranks=num_ranks,
        num_kv_blocks=rng.choice([12, 24]),
        budget=rng.choice([3, 16]),
        route_replay=route_replay,
    )
    stem = make_prompt(24, seed=seed)
    prompts = {f"r{n}": [*stem[: rng.randrange(25)], n] for n in range(30)}
    for request_id, prompt in prompts.items():
        harness.submit(request_id, prompt, rng.randrange(1, 20))
        for _ in range(rng.randrange(6)):
            if harness.engine.has_work:
                harness.step()
        if rng.random() < 0.2:
            harness.engine.evict(rng.choice(["kv", "routes"]))
    harness.run()
    for request_id, prompt in prompts.items():
        generation = harness.generations[request_id]
        routes = generation.completion.topk_ids
        assert tokens_of(prompt, generation.token_ids, routes) == generation.token_ids
    conflicts = sum(read_metrics(harness)("route_conflicts_total").values())
    assert route_replay or conflicts > 0
