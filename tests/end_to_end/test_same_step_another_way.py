"""The same steps over another dispatch, issued twice, or computed by the worker that is served: the same bytes."""

from collections.abc import Iterator

import pytest

from cluster.types import EvictTarget, Rank
from cluster.worker_messages import (
    RouteChunk,
    RouteFrame,
    SequenceStart,
    StepDescriptor,
    StepResult,
)
from router_service.clients import Workers
from tests.helpers.cells import CellOptions, running_cell
from tests.helpers.engines import EngineHarness
from tests.helpers.equality import byte_differences
from tests.helpers.states import ObservedRanks, RequestRun, observed_ranks, random_prompt
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

PROMPT = random_prompt(90, seed=140)
BUDGET = 24
FRAME_SECONDS = 20.0


@pytest.fixture(scope="module")
def observed() -> Iterator[ObservedRanks]:
    with observed_ranks(DEMO_MODEL_DIR) as observed:
        yield observed


def generate(observed: ObservedRanks) -> RequestRun:
    return observed.bench(budget=BUDGET).generate(PROMPT, 8)


def test_negotiated_dispatch_computes_the_bytes_of_local_dispatch(observed: ObservedRanks) -> None:
    with observed_ranks(DEMO_MODEL_DIR, negotiated=True) as negotiated:
        run = generate(negotiated)
    assert byte_differences(run, generate(observed)) == []


@pytest.mark.parametrize("ep_size", [1, 2])
def test_the_served_worker_answers_with_the_bytes_of_the_observed_one(ep_size: int) -> None:
    with observed_ranks(DEMO_MODEL_DIR, ep_size=ep_size) as observed:
        expected = generate(observed)
    options = CellOptions(DEMO_MODEL_DIR, ep_size=ep_size, engine={"budget": BUDGET})
    with running_cell(options) as harness:
        answer = answer_of(harness)
    assert byte_differences(answer, expected) == []


def answer_of(harness: EngineHarness) -> RequestRun:
    generation = harness.generate("r", PROMPT, 8)
    assert generation.completion is not None
    return RequestRun(PROMPT, generation.token_ids, generation.completion, generation.routes, [])


class Repeating:
    """Workers to which every step is issued twice; the engine sees the second answer and its routes."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._frames: list[RouteFrame] = []
        self.answers: list[tuple[list[int], list[int]]] = []
        """Tokens of the first and of the second answer of every step."""

    def start_sequence(self, rank: Rank, start: SequenceStart) -> None:
        self._workers.start_sequence(rank, start)

    def end_sequences(self, rank: Rank, seq_ids: list[int]) -> None:
        self._workers.end_sequences(rank, seq_ids)

    def send_routes(self, rank: Rank, chunk: RouteChunk) -> None:
        self._workers.send_routes(rank, chunk)

    def execute(self, step: StepDescriptor) -> list[StepResult]:
        first, _ = self._execute(step)
        second, self._frames = self._execute(step)
        self.answers.append((_tokens(first), _tokens(second)))
        return second

    def _execute(self, step: StepDescriptor) -> tuple[list[StepResult], list[RouteFrame]]:
        """Waits for the frames too, so that those of both times cannot be mixed up."""
        results = self._workers.execute(step)
        num_frames = sum(result.gate_tokens > 0 for result in results)
        frames: list[RouteFrame] = []
        while len(frames) < num_frames:
            arrived = self._workers.frames(FRAME_SECONDS)
            assert arrived, f"{len(frames)} of {num_frames} route frames arrived"
            frames += arrived
        return results, frames

    def frames(self, timeout_seconds: float) -> list[RouteFrame]:
        frames, self._frames = self._frames, []
        return frames


def _tokens(results: list[StepResult]) -> list[int]:
    return [token_id for result in results for token_id in result.token_ids]


@pytest.mark.parametrize("evicted", [None, "kv"], ids=["gate", "replay"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_step_issued_twice_computes_the_bytes_of_one(
    ep_size: int, evicted: EvictTarget | None
) -> None:
    with observed_ranks(DEMO_MODEL_DIR, ep_size=ep_size) as observed:
        once = generate(observed)
        bench = observed.bench(Repeating(observed.ranks.client), budget=BUDGET)
        run = bench.generate(PROMPT, 8)
        if evicted is not None:
            bench.harness.engine.evict(evicted)
            run = bench.generate(PROMPT, 8)
    assert run.num_computed == 2 * once.num_computed
    assert byte_differences(run, once) == []


def test_both_answers_of_a_repeated_step_hold_the_same_tokens(observed: ObservedRanks) -> None:
    workers = Repeating(observed.ranks.client)
    bench = observed.bench(workers, budget=BUDGET)
    bench.submit(PROMPT, 8, temperature=1.0, top_p=0.9, seed=5)
    bench.submit(PROMPT[:50], 8)
    bench.finish()
    assert all(first == second for first, second in workers.answers)
