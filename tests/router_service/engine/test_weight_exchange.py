"""Weights exchanged between any two steps of any traffic: every answer is of one set of weights, or says why not."""

import random

import numpy as np
import pytest

from tests.helpers.content_engine import make_prompt
from tests.helpers.content_workers import SHAPE, ContentWorkers, oracle, score_oracle
from tests.helpers.engines import EngineHarness, Generation

NUM_RANKS, BLOCK_SIZE = 2, 4
FIRST = "first weights"


class ExchangingCell:
    """Engine and workers that get other weights together. Weights are named by their fingerprint."""

    def __init__(self, frame_delay: int = 0, **options: int) -> None:
        self.workers = ContentWorkers(
            NUM_RANKS, BLOCK_SIZE, frame_delay=frame_delay, root=FIRST.encode()
        )
        self.harness = EngineHarness(
            self.workers,
            SHAPE,
            num_ranks=NUM_RANKS,
            block_size=BLOCK_SIZE,
            fingerprint=FIRST,
            **options,
        )

    def exchange(self, fingerprint: str, *, restart: bool) -> None:
        engine = self.harness.engine
        engine.settle()
        engine.exchange_weights(fingerprint, restart=restart)
        self.workers.root = fingerprint.encode()
        stats = self.harness.store.stats()
        assert (stats.num_nodes, stats.kv_blocks_leased, sum(stats.kv_blocks_used)) == (0, 0, 0)
        self.harness.collect()
        self.harness.store.check_invariants()


def assert_made_by(
    generation: Generation, prompt: list[int], max_tokens: int, fingerprint: str
) -> None:
    tokens, routes = oracle(prompt, max_tokens, fingerprint.encode())
    assert generation.token_ids == tokens
    completion = generation.completion
    assert completion is not None
    assert completion.finish_reason == "length"
    np.testing.assert_array_equal(generation.routes.topk_ids, routes)
    scores = score_oracle(prompt + tokens, fingerprint.encode())[len(prompt) - 1 :]
    told = [float(score.chosen_logprobs[0]) for score in generation.scores]
    assert told == [score[0] for score in scores]


@pytest.mark.parametrize("seed", range(4))
def test_every_answer_is_of_the_weights_that_it_names_or_an_error(seed: int) -> None:
    draw = random.Random(seed)
    cell = ExchangingCell(frame_delay=seed, num_kv_blocks=24, max_num_seqs=3)
    harness = cell.harness
    prefix = make_prompt(14, seed)
    asked: dict[str, tuple[list[int], int]] = {}
    fingerprint = FIRST
    for step in range(120):
        if draw.random() < 0.25:
            name, prompt = f"r{step}", prefix[: draw.randrange(4, 15)] + make_prompt(3, step % 5)
            asked[name] = prompt, draw.randrange(1, 12)
            harness.submit(name, *asked[name], is_streamed=draw.random() < 0.5)
        if draw.random() < 0.08:
            fingerprint = draw.choice([FIRST, "second", "third"])
            cell.exchange(fingerprint, restart=draw.random() < 0.5)
        harness.step()
    harness.run()
    ended = [(name, harness.generations[name]) for name in asked]
    whole = [(name, g) for name, g in ended if g.completion.finish_reason == "length"]
    for name, generation in whole:
        (version,) = generation.weight_versions
        made_by = next(f for f in (FIRST, "second", "third") if f.startswith(version))
        assert_made_by(generation, *asked[name], made_by)
    for _, generation in ended:
        assert generation.completion.finish_reason in ("length", "abort")
    assert len({v for _, g in whole for v in g.weight_versions}) > 1
    assert len(whole) < len(ended)


def test_what_a_committed_step_still_owes_is_told_as_the_old_weights_own() -> None:
    cell = ExchangingCell(frame_delay=5)
    harness, prompt = cell.harness, make_prompt(9)
    harness.submit("r", prompt, 1)
    while not harness.generations["r"].token_ids:
        harness.step()
    assert harness.generations["r"].completion is None
    cell.exchange("second", restart=False)
    assert_made_by(harness.generations["r"], prompt, 1, FIRST)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_request_that_had_waited_shares_its_prefix_with_those_that_come_after(
    at_once: bool,
) -> None:
    cell = ExchangingCell(budget=8)
    harness, prompt = cell.harness, make_prompt(41)
    harness.submit("running", prompt, 3)
    harness.submit("waited", prompt, 3)
    harness.step()
    assert [r.request_id for r in harness.scheduler.waiting] == ["waited"]  # for that prefix
    cell.exchange("second", restart=False)
    assert harness.generations["running"].completion.finish_reason == "abort"
    if not at_once:
        harness.run()
    harness.submit("came after", prompt, 3)
    harness.run()
    for name, num_taken in (("waited", 0), ("came after", 40)):
        assert_made_by(harness.generations[name], prompt, 3, "second")
        completion = harness.generations[name].completion
        assert completion.cached_tokens + completion.replayed_tokens == num_taken


def test_a_request_that_was_put_back_has_begun() -> None:
    cell = ExchangingCell(num_kv_blocks=6, max_num_seqs=4)
    harness = cell.harness
    for number in range(4):
        harness.submit(f"r{number}", make_prompt(8, number), 14)
    while not harness.scheduler.num_preemptions:
        harness.step()
    (preempted,) = [r for r in harness.scheduler.waiting if r.was_admitted][:1]
    cell.exchange("second", restart=True)
    completion = harness.generations[preempted.request_id].completion
    assert completion is not None
    assert (completion.finish_reason, completion.again) == ("abort", True)
    harness.run()
