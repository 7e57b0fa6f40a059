"""One worker on the demo model: what it computes, what it reports, what it refuses before it starts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.errors import GrammarError
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes
from cluster.worker_messages import RouteChunk, SentTraffic, SequenceStart
from expert_workers.dispatch.base import DispatchedTokens
from expert_workers.dispatch.load import LoadCountingDispatcher
from expert_workers.inputs_from_step import StepRefusedError
from expert_workers.known_sequences import KnownSequences
from expert_workers.kv_pool import KVPool
from expert_workers.model.numerics import FastNumerics
from expert_workers.model.transformer import Transformer
from expert_workers.model.weights import WeightTarget, load_weights
from expert_workers.plan_cache import PlanCache, PlanShape
from expert_workers.rank_model import RankModel
from expert_workers.weight_exchange import WeightExchange
from expert_workers.worker import ExpertWorker
from expert_workers.worker_builder import build_expert_worker, rank_identity
from tests.expert_workers.driving import (
    BLOCK_SIZE,
    DEMO_MODEL,
    NUM_KV_BLOCKS,
    SPEC,
    ChunkSpec,
    DrivenSequence,
    Driver,
    OneWorkerCell,
    make_options,
    make_prompt,
    make_step,
)

SHAPE = SPEC.route_shape


def make_worker() -> ExpertWorker:
    torch.set_num_threads(1)
    return build_expert_worker(make_options())


def make_sequences(temperature: float = 0.0) -> list[DrivenSequence]:
    return [
        DrivenSequence(i, make_prompt(20 + 9 * i, seed=i), temperature=temperature)
        for i in range(3)
    ]


def generate(
    sequences: list[DrivenSequence], num_output_tokens: int = 4, *, chunk_tokens: int = 64
) -> list[DrivenSequence]:
    driver = Driver(OneWorkerCell(make_worker()), chunk_tokens=chunk_tokens)
    driver.run(sequences, num_output_tokens)
    return sequences


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_and_routes_do_not_depend_on_chunks_and_neighbours(temperature: float) -> None:
    together = generate(make_sequences(temperature=temperature))
    alone = [generate([s], chunk_tokens=7)[0] for s in make_sequences(temperature=temperature)]
    assert [s.output for s in together] == [s.output for s in alone]
    assert all(
        a.all_routes.topk_weights.tobytes() == b.all_routes.topk_weights.tobytes()
        and a.all_routes.same_ids(b.all_routes)
        for a, b in zip(together, alone, strict=True)
    )


def test_replayed_routes_give_the_same_tokens_without_a_gate() -> None:
    cold = generate(make_sequences())
    warm = make_sequences()
    for sequence, before in zip(warm, cold, strict=True):
        sequence.replay = before.all_routes
    cell = OneWorkerCell(make_worker())
    results = Driver(cell).run(warm, 4)
    assert [s.output for s in warm] == [s.output for s in cold]
    assert sum(result.gate_tokens for result in results) == 0


def test_a_changed_route_changes_what_is_computed() -> None:
    cold = generate(make_sequences())[0]
    ids = cold.all_routes.topk_ids.copy()
    ids[:] = np.arange(SHAPE.num_experts_per_tok)
    warm = make_sequences()[0]
    warm.replay = ExpertRoutes(ids, cold.all_routes.topk_weights)
    assert generate([warm])[0].output != cold.output


def test_gate_and_replay_in_one_step_answer_in_the_descriptors_order() -> None:
    cold = generate(make_sequences(), 2)
    mixed = make_sequences()
    mixed[0].replay = cold[0].all_routes
    mixed[2].replay = cold[2].all_routes
    cell = OneWorkerCell(make_worker())
    results = Driver(cell).run(mixed, 2)
    assert [s.output for s in mixed] == [s.output for s in cold]
    assert results[0].seq_ids == [0, 1, 2]
    assert results[0].gate_tokens == len(mixed[1].prompt)
    assert [s.all_routes.same_ids(c.all_routes) for s, c in zip(mixed, cold, strict=True)] == [
        True
    ] * 3


def test_chunks_that_do_not_sample_have_no_token() -> None:
    worker = make_worker()
    step = make_step(0, [ChunkSpec(1, make_prompt(9, 0), [0], samples=False)])
    outcome = worker.execute(step)
    assert (outcome.result.seq_ids, outcome.result.token_ids) == ([], [])
    assert outcome.routes is not None
    assert outcome.routes.topk_ids.shape == (9, SHAPE.num_moe_layers, SHAPE.num_experts_per_tok)
    assert outcome.routes.topk_ids.dtype == SHAPE.id_dtype
    assert outcome.routes.topk_weights.dtype == SHAPE.weight_dtype


def test_a_step_without_chunks_answers_with_nothing() -> None:
    outcome = make_worker().execute(make_step(4, []))
    assert outcome.routes is None
    assert outcome.result.seq_ids == []
    assert outcome.result.expert_load.shape == (SHAPE.num_moe_layers, SHAPE.num_experts)
    assert outcome.result.expert_load.sum() == 0


def test_expert_load_counts_every_row_that_an_expert_served() -> None:
    outcome = make_worker().execute(
        make_step(0, [ChunkSpec(1, make_prompt(9, 0), [0], samples=False)])
    )
    assert outcome.routes is not None
    ids = outcome.routes.topk_ids.astype(np.int64)
    expected = [
        np.bincount(ids[:, layer].ravel(), minlength=SHAPE.num_experts)
        for layer in range(SHAPE.num_moe_layers)
    ]
    np.testing.assert_array_equal(outcome.result.expert_load, expected)
    assert outcome.result.expert_load.dtype == np.int32


def test_a_rank_alone_sends_nothing() -> None:
    outcome = make_worker().execute(
        make_step(0, [ChunkSpec(1, make_prompt(9, 0), [0], samples=False)])
    )
    assert outcome.result.sent == SentTraffic(messages=0, bytes=0)


def test_timings_lie_within_the_forward_time() -> None:
    outcome = make_worker().execute(
        make_step(0, [ChunkSpec(1, make_prompt(9, 0), [0], samples=False)])
    )
    timings = outcome.result.timings
    parts = [timings.attention, timings.gate, timings.dispatch, timings.experts, timings.combine]
    assert min(parts) > 0
    assert sum(parts) < timings.forward


def test_a_poisoned_sequence_is_reported_and_its_neighbour_is_served() -> None:
    worker = make_worker()
    sequences = make_sequences()[:2]
    driver = Driver(OneWorkerCell(worker))
    driver.run(sequences, 2)
    first_block = sequences[0].blocks[0]
    worker.kv_pool.rows[:, first_block * BLOCK_SIZE] = float("nan")
    (result,) = driver.step(sequences)
    assert result.poisoned_seq_ids == [0]
    assert result.seq_ids == [1]
    assert sequences[1].output == generate(make_sequences()[:2], 3)[1].output


GOOD = ChunkSpec(seq_id=1, token_ids=[5, 6, 7], blocks=[3])


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (replace(GOOD, route_id=8), "has not received"),
        (replace(GOOD, seq_id=99), "never told of"),
        (replace(GOOD, token_ids=[5, SPEC.vocab_size]), "input_ids holds 3072"),
        (replace(GOOD, token_ids=[-1]), "input_ids holds -1"),
        (replace(GOOD, token_ids=[]), "num_tokens holds 0"),
        (replace(GOOD, blocks=[NUM_KV_BLOCKS]), "block_tables holds 64"),
        (replace(GOOD, blocks=[-1]), "block_tables holds -1"),
        (replace(GOOD, first_position=14), "has room for 16 tokens"),
        (replace(GOOD, first_position=4094, blocks=[1] * 257), "last positions"),
        (replace(GOOD, rank=1), "ranks holds 1"),
    ],
)
def test_a_bad_chunk_is_refused_before_any_dispatch(chunk: ChunkSpec, reason: str) -> None:
    worker, dispatcher = worker_with_counted_dispatches()
    with pytest.raises(StepRefusedError, match=reason):
        worker.execute(make_step(3, [GOOD, chunk]))
    assert dispatcher.num_dispatches == 0


def test_another_placement_epoch_or_dispatch_mode_is_refused() -> None:
    worker, dispatcher = worker_with_counted_dispatches()
    with pytest.raises(StepRefusedError, match="epoch 2, this rank holds epoch 0"):
        worker.execute(make_step(0, [GOOD], placement_epoch=2))
    with pytest.raises(StepRefusedError, match="asks for negotiated dispatch"):
        worker.execute(make_step(0, [GOOD], dispatch="negotiated"))
    assert dispatcher.num_dispatches == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step_id": 2}, "has not received for this step"),
        ({"topk_ids": np.zeros((2, 4, 4), np.uint8)}, "of shape"),
        ({"topk_ids": np.zeros((3, 4, 4), np.int32)}, "of int32"),
        ({"topk_ids": np.full((3, 4, 4), 64, np.uint8)}, "with expert 64"),
        ({"topk_weights": np.zeros((3, 4, 4), np.float64)}, "float64"),
    ],
)
def test_routes_that_do_not_fit_the_chunk_are_refused(
    changes: dict[str, object], reason: str
) -> None:
    worker, dispatcher = worker_with_counted_dispatches()
    fields = {
        "route_id": 8,
        "step_id": 3,
        "topk_ids": np.zeros((3, 4, 4), np.uint8),
        "topk_weights": np.zeros((3, 4, 4), np.float32),
    }
    worker.add_route_chunk(RouteChunk(**(fields | changes)))  # type: ignore[arg-type]
    with pytest.raises(StepRefusedError, match=reason):
        worker.execute(make_step(3, [replace(GOOD, route_id=8)]))
    assert dispatcher.num_dispatches == 0


def test_a_good_chunk_is_dispatched_once_per_moe_layer() -> None:
    worker, dispatcher = worker_with_counted_dispatches()
    worker.execute(make_step(0, [GOOD]))
    assert dispatcher.num_dispatches == SHAPE.num_moe_layers


def test_an_ended_sequence_cannot_sample_any_more() -> None:
    worker, _ = worker_with_counted_dispatches()
    worker.end_sequences([1, 77])
    with pytest.raises(StepRefusedError, match="never told of"):
        worker.execute(make_step(0, [GOOD]))


class CountingDispatcher:
    """Local dispatch that knows how often it was asked."""

    def __init__(self) -> None:
        self.num_dispatches = 0

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, positions: Tensor
    ) -> DispatchedTokens:
        self.num_dispatches += 1
        return DispatchedTokens(x, topk_ids, topk_weights, None)

    def combine(self, y: Tensor, handle: object) -> Tensor:
        return y


def worker_with_counted_dispatches() -> tuple[ExpertWorker, CountingDispatcher]:
    """Knows sequence 1."""
    cpu = torch.device("cpu")
    placement = ExpertPlacement.contiguous(SPEC.gate.num_experts, 1)
    target = WeightTarget(placement, 0, torch.float32, cpu)
    weights = load_weights(DEMO_MODEL, SPEC, target)
    dispatcher = CountingDispatcher()
    worker = ExpertWorker(
        rank=0,
        identity=rank_identity(make_options(), placement),
        model=RankModel(
            SPEC,
            Transformer(SPEC, weights, FastNumerics()),
            WeightExchange(weights, SPEC, target, "float32"),
        ),
        kv_pool=KVPool(
            num_layers=SPEC.num_layers,
            num_blocks=NUM_KV_BLOCKS,
            block_size=BLOCK_SIZE,
            width=SPEC.attention.kv_width,
            dtype=torch.float32,
            device=cpu,
        ),
        dispatcher=LoadCountingDispatcher(dispatcher, placement.num_physical_per_rank),
        plans=PlanCache(
            PlanShape(
                rank=0,
                ep_size=1,
                placement_epoch=0,
                num_layers=SPEC.num_moe_layers,
                num_experts=SPEC.gate.num_experts,
                num_experts_per_tok=SPEC.gate.num_experts_per_tok,
                min_group_rows=1,
                device=cpu,
            ),
            exchange=None,
        ),
        group=None,
        sequences=KnownSequences(GrammarError("not of this test")),
    )
    worker.start_sequence(SequenceStart(1, 0.0, 1.0, 0))
    return worker, dispatcher


def test_a_pass_over_kept_kv_reads_it_and_writes_none() -> None:
    worker = make_worker()
    prompt = make_prompt(40, seed=8)
    worker.start_sequence(SequenceStart(0, 0.0, 1.0, 0))
    chunk = ChunkSpec(seq_id=0, token_ids=prompt, blocks=[3, 7, 1])
    first = worker.execute(make_step(0, [chunk]))
    rows = worker.kv_pool.rows.clone()
    again = worker.execute(make_step(1, [replace(chunk, num_suppressed=40)]))
    assert again.result.token_ids == first.result.token_ids
    assert again.routes is not None
    assert first.routes is not None
    assert again.routes.topk_weights.tobytes() == first.routes.topk_weights.tobytes()
    assert torch.equal(worker.kv_pool.rows, rows)
    worker.kv_pool.rows[:, 3 * BLOCK_SIZE] += 1.0
    other = worker.execute(make_step(2, [replace(chunk, num_suppressed=40)]))
    assert other.routes is not None
    assert other.routes.topk_weights.tobytes() != first.routes.topk_weights.tobytes()
    worker.kv_pool.rows.copy_(rows)
    half = worker.execute(make_step(3, [replace(chunk, num_suppressed=20)]))
    assert half.result.token_ids == first.result.token_ids
    assert torch.equal(worker.kv_pool.rows, rows)
