"""Routes that come back are those that made the tokens."""

import random

import numpy as np
import pytest

from tests.helpers.content_engine import make_harness, make_prompt, read_metrics
from tests.helpers.content_workers import (
    SHAPE,
    ContentWorkers,
    hidden_of,
    next_token,
    slot_content,
)
from tests.helpers.engines import EngineHarness


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
        routes = generation.routes.topk_ids
        assert tokens_of(prompt, generation.token_ids, routes) == generation.token_ids
    conflicts = sum(read_metrics(harness)("route_conflicts_total").values())
    assert route_replay or conflicts > 0
