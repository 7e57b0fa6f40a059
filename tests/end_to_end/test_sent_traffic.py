"""What ranks report to have sent: of planned steps what routes and placement say, of negotiated ones three all-to-alls.

Letters: S chunks of a step, n tokens of a chunk, L MoE layers, K experts of a token, W ranks.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.model_config.read import read_model_spec
from cluster.types import Rank
from cluster.worker_messages import (
    RouteChunk,
    RouteFrame,
    SentTraffic,
    SequenceStart,
    StepDescriptor,
    StepResult,
)
from router_service.clients import Workers
from tests.helpers.cells import CellOptions, running_ranks
from tests.helpers.states import random_prompt
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

EP_SIZE = 4
SPEC = read_model_spec(DEMO_MODEL_DIR)
NUM_LAYERS = SPEC.num_moe_layers
EXPERTS_PER_RANK = SPEC.gate.num_experts // EP_SIZE
ROW_BYTES = 4 * SPEC.hidden_size
NEGOTIATED_MESSAGES = 3 * NUM_LAYERS * (EP_SIZE - 1)
"""Of one rank in one step: counts, rows and results to every other one."""
PROMPTS = [random_prompt(length, seed=400 + length) for length in (16, 32, 21)]


class Recording:
    """Workers whose steps and answers are kept."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.steps: list[tuple[StepDescriptor, list[StepResult]]] = []

    def start_sequence(self, rank: Rank, start: SequenceStart) -> None:
        self._workers.start_sequence(rank, start)

    def end_sequences(self, rank: Rank, seq_ids: list[int]) -> None:
        self._workers.end_sequences(rank, seq_ids)

    def send_routes(self, rank: Rank, chunk: RouteChunk) -> None:
        self._workers.send_routes(rank, chunk)

    def execute(self, step: StepDescriptor) -> list[StepResult]:
        results = self._workers.execute(step)
        self.steps.append((step, results))
        return results

    def frames(self, timeout_seconds: float) -> list[RouteFrame]:
        return self._workers.frames(timeout_seconds)


@dataclass(frozen=True)
class Step:
    """pair_rows: [L, W, W] rows of planned chunks from each rank to each other one, 0 to itself."""

    way: str
    pair_rows: npt.NDArray[np.int64]
    sent: list[SentTraffic]

    @property
    def num_messages(self) -> int:
        return sum(sent.messages for sent in self.sent)

    @property
    def num_bytes(self) -> int:
        return sum(sent.bytes for sent in self.sent)


@dataclass(frozen=True)
class Traffic:
    """Of prompts that were computed together and, when their KV was gone, replayed together."""

    cold: list[Step]
    replays: list[Step]
    metrics: Mapping[tuple[str, str], float]
    """Values by name and `dispatch`."""

    def replays_that_are(self, way: str) -> list[Step]:
        steps = [step for step in self.replays if step.way == way]
        assert steps, f"no step of the replays is {way}"
        return steps


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    with running_ranks(CellOptions(DEMO_MODEL_DIR, ep_size=EP_SIZE)) as ranks:
        recording = Recording(ranks.client)
        harness = ranks.engine(recording, fragment_tokens=8, budget=8)
        for name in ("cold", "replay"):
            for number, prompt in enumerate(PROMPTS):
                harness.submit(f"{name}-{number}", prompt, 2)
            harness.run()
            if name == "cold":
                num_cold_steps = len(recording.steps)
                harness.engine.evict("kv")
    routes = [harness.generations[f"cold-{n}"].routes.topk_ids for n in range(len(PROMPTS))]
    steps = [
        Step(way_of(step), pair_rows(step, routes), [result.sent for result in results])
        for step, results in recording.steps
    ]
    values = values_by_dispatch(harness.metrics.render().decode())
    return Traffic(steps[:num_cold_steps], steps[num_cold_steps:], values)


def way_of(step: StepDescriptor) -> str:
    planned = step.fragment_lens > 0
    if planned.all():
        return "planned"
    return "mixed" if planned.any() else "negotiated"


def pair_rows(
    step: StepDescriptor, routes: Sequence[npt.NDArray[np.unsignedinteger]]
) -> npt.NDArray[np.int64]:
    """routes: of each prompt [tokens, L, K]; seq_ids count the submits, so a replay has that of its cold run + 3."""
    rows = np.zeros((NUM_LAYERS, EP_SIZE, EP_SIZE), np.int64)
    for chunk in np.flatnonzero(step.fragment_lens).tolist():
        start, source = step.first_positions[chunk], step.ranks[chunk]
        topk_ids = routes[step.seq_ids[chunk] % len(PROMPTS)]
        for token in topk_ids[start : start + step.num_tokens[chunk]]:
            for layer, ids in enumerate(token):
                for destination in set((ids // EXPERTS_PER_RANK).tolist()) - {int(source)}:
                    rows[layer, source, destination] += 1
    return rows


def values_by_dispatch(page: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels["dispatch"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "dispatch" in sample.labels
    }


def planned_messages(step: Step, rank: int) -> int:
    """There and back."""
    return np.count_nonzero(step.pair_rows[:, rank]) + np.count_nonzero(step.pair_rows[:, :, rank])


def planned_bytes(step: Step, rank: int) -> int:
    num_rows = step.pair_rows[:, rank].sum() + step.pair_rows[:, :, rank].sum()
    return int(num_rows) * ROW_BYTES


def test_a_planned_step_sends_one_message_there_and_one_back_per_pair_with_rows(
    traffic: Traffic,
) -> None:
    for step in traffic.replays_that_are("planned"):
        assert step.num_messages == 2 * np.count_nonzero(step.pair_rows)
        assert step.sent == [
            SentTraffic(planned_messages(step, rank), planned_bytes(step, rank))
            for rank in range(EP_SIZE)
        ]


def test_a_negotiated_step_sends_three_messages_per_layer_to_every_other_rank(
    traffic: Traffic,
) -> None:
    for step in traffic.cold:
        assert [sent.messages for sent in step.sent] == [NEGOTIATED_MESSAGES] * EP_SIZE


def test_a_mixed_step_sends_both(traffic: Traffic) -> None:
    for step in traffic.replays_that_are("mixed"):
        assert [sent.messages for sent in step.sent] == [
            NEGOTIATED_MESSAGES + planned_messages(step, rank) for rank in range(EP_SIZE)
        ]


def test_a_plan_sends_fewer_messages_and_bytes_than_a_negotiation_of_the_same_tokens(
    traffic: Traffic,
) -> None:
    """The first step of either has the first eight tokens of every prompt."""
    negotiated, planned = traffic.cold[0], traffic.replays[0]
    assert (negotiated.way, planned.way) == ("negotiated", "planned")
    assert 0 < planned.num_messages < negotiated.num_messages
    assert 0 < planned.num_bytes < negotiated.num_bytes


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("pointsman_exchange_messages_total", lambda step: step.num_messages),
        ("pointsman_exchange_bytes_total", lambda step: step.num_bytes),
    ],
    ids=["messages", "bytes"],
)
def test_metrics_count_what_all_ranks_sent_by_the_way_of_the_step(
    traffic: Traffic, name: str, number: Callable[[Step], int]
) -> None:
    expected: Counter[str] = Counter()
    for step in traffic.cold + traffic.replays:
        expected[step.way] += number(step)
    assert set(expected) == {"negotiated", "planned", "mixed"}
    assert {way: traffic.metrics[name, way] for way in expected} == expected
