"""From a descriptor to one rank's tensors."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from cluster.routes import ExpertRoutes, RouteShape
from cluster.wire import Decoder, encode
from cluster.worker_messages import StepDescriptor
from expert_workers.inputs_from_step import (
    InputsBuilder,
    PlannedChunk,
    StepLimits,
    StepRefusedError,
    check_step,
    chunks_of_rank,
    has_dynamic_chunks,
    planned_chunks_of_step,
)
from tests.expert_workers.driving import ChunkSpec, make_step

SHAPE = RouteShape(num_moe_layers=2, num_experts_per_tok=2, num_experts=8)
BUILDER = InputsBuilder(block_size=4, route_shape=SHAPE, device=torch.device("cpu"))
LIMITS = StepLimits(
    ep_size=2,
    placement_epoch=0,
    dispatch="local",
    vocab_size=100,
    max_position_embeddings=64,
    num_kv_blocks=10,
    block_size=4,
)
CHUNKS = [
    ChunkSpec(seq_id=4, token_ids=[10, 11], blocks=[7, 2], first_position=3, rank=0, route_id=1),
    ChunkSpec(seq_id=9, token_ids=[20], blocks=[5], rank=0, samples=False),
    ChunkSpec(seq_id=5, token_ids=[30, 31, 32], blocks=[9], rank=0),
    ChunkSpec(seq_id=6, token_ids=[40], blocks=[1], rank=1),
]


def make_routes(num_tokens: int) -> ExpertRoutes:
    ids = np.arange(num_tokens * 4, dtype=np.uint8).reshape(num_tokens, 2, 2) % 8
    return ExpertRoutes(ids, ids.astype(np.float32) / 8)


def test_a_rank_gets_its_chunks_in_the_descriptors_order() -> None:
    step = make_step(0, CHUNKS)
    assert [(c.index, c.seq_id) for c in chunks_of_rank(step, 0)] == [(0, 4), (1, 9), (2, 5)]
    (chunk,) = chunks_of_rank(step, 1)
    assert (chunk.input_ids.tolist(), chunk.block_table.tolist()) == ([40], [1])
    assert (chunk.route_id, chunk.samples, chunk.end_position) == (None, True, 1)


def test_chunks_of_the_gate_come_first_and_slots_follow_the_block_table() -> None:
    replaying, *gate_chunks = chunks_of_rank(make_step(0, CHUNKS), 0)
    routes = make_routes(2)
    inputs = BUILDER.build(gate_chunks, [replaying], routes)
    assert inputs.input_ids.tolist() == [20, 30, 31, 32, 10, 11]
    assert inputs.positions.tolist() == [0, 0, 1, 2, 3, 4]
    assert inputs.slot_mapping.tolist() == [20, 36, 37, 38, 31, 8]
    assert inputs.cu_seqlens_q == (0, 1, 4, 6)
    assert inputs.seq_lens == (1, 3, 5)
    assert [table.tolist() for table in inputs.block_tables] == [[5], [9], [7, 2]]
    assert inputs.num_gate_tokens == 4
    assert inputs.last_token_indices.tolist() == [3, 5]
    assert inputs.replay_topk_ids.tolist() == routes.topk_ids.tolist()
    assert torch.equal(inputs.replay_topk_weights, torch.from_numpy(routes.topk_weights))


def test_suppressed_tokens_have_no_slot_and_the_others_keep_their_rows() -> None:
    again = replace(CHUNKS[0], num_suppressed=1)
    first, *others = chunks_of_rank(make_step(0, [again, *CHUNKS[1:]]), 0)
    inputs = BUILDER.build(others, [first], make_routes(2))
    assert inputs.slot_mapping.tolist() == [20, 36, 37, 38, 8]
    assert inputs.written_tokens is not None
    assert inputs.written_tokens.tolist() == [0, 1, 2, 3, 5]
    assert inputs.positions.tolist() == [0, 0, 1, 2, 3, 4]


def test_without_suppressed_tokens_all_are_written() -> None:
    inputs = BUILDER.build(chunks_of_rank(make_step(0, CHUNKS), 1), [], ExpertRoutes.empty(SHAPE))
    assert inputs.written_tokens is None


def test_a_rank_without_chunks_gets_empty_tensors_of_the_right_kind() -> None:
    inputs = BUILDER.build([], [], ExpertRoutes.empty(SHAPE))
    integers = (inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.last_token_indices)
    assert [(tuple(t.shape), t.dtype) for t in integers] == [((0,), torch.int64)] * 4
    assert (inputs.cu_seqlens_q, inputs.seq_lens, inputs.block_tables) == ((0,), (), ())
    assert inputs.replay_topk_ids.shape == (0, 2, 2)


def test_a_descriptor_from_the_wire_is_accepted_and_built() -> None:
    decoder: Decoder[StepDescriptor] = Decoder(StepDescriptor)
    step = decoder.decode(encode(make_step(0, CHUNKS)))
    check_step(step, LIMITS)
    inputs = BUILDER.build(chunks_of_rank(step, 1), [], ExpertRoutes.empty(SHAPE))
    assert inputs.slot_mapping.tolist() == [4]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_good_chunks_are_accepted(chunk: ChunkSpec) -> None:
    check_step(make_step(0, [chunk]), LIMITS)
    check_step(make_step(0, []), LIMITS)


def test_every_rank_refuses_what_only_another_rank_would_run() -> None:
    bad = replace(CHUNKS[3], token_ids=[100])
    with pytest.raises(StepRefusedError, match="input_ids holds 100, allowed are 0 to 99"):
        check_step(make_step(0, [CHUNKS[0], bad]), LIMITS)


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("ranks", np.zeros(3, np.int32), "ranks has 3 entries for 4 chunks"),
        ("input_ids", np.zeros(9, np.int32), "input_ids has 9 entries, its chunks say 7"),
        ("block_tables", np.zeros(9, np.int32), "block_tables has 9 entries, its chunks say 5"),
        ("seq_ids", np.zeros(4, np.int64), "seq_ids is int64"),
        ("input_ids", np.zeros((7, 1), np.int32), r"input_ids is int32 \(7, 1\)"),
        ("samples", np.full(4, 2, np.int32), "samples holds 2"),
        (
            "num_suppressed",
            np.array([3, 0, 0, 0], np.int32),
            "seq 4 has num_suppressed 3, its chunk has 2",
        ),
        ("num_suppressed", np.array([-1, 0, 0, 0], np.int32), "num_suppressed holds -1"),
        ("block_table_lens", np.array([2, 0, 2, 1], np.int32), "block_table_lens holds 0"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(
    column: str, values: np.ndarray, reason: str
) -> None:
    step = msgspec.structs.replace(make_step(0, CHUNKS), **{column: values})
    with pytest.raises(StepRefusedError, match=reason):
        check_step(step, LIMITS)


PLANNED_CHUNKS = [
    replace(CHUNKS[1], fragment_ids=[3, 8]),
    CHUNKS[2],
    replace(CHUNKS[3], fragment_ids=[8]),
]


def test_every_rank_sees_all_planned_chunks_and_whether_there_are_others() -> None:
    step = make_step(0, PLANNED_CHUNKS)
    assert planned_chunks_of_step(step) == [
        PlannedChunk(seq_id=9, source=0, num_tokens=1, fragment_ids=(3, 8)),
        PlannedChunk(seq_id=6, source=1, num_tokens=1, fragment_ids=(8,)),
    ]
    assert [c.fragment_ids for c in chunks_of_rank(step, 0)] == [(3, 8), ()]
    assert has_dynamic_chunks(step)
    assert not has_dynamic_chunks(make_step(0, [PLANNED_CHUNKS[0], PLANNED_CHUNKS[2]]))


def test_planned_chunks_come_last() -> None:
    planned, gate = chunks_of_rank(make_step(0, PLANNED_CHUNKS), 0)
    inputs = BUILDER.build([gate], [], ExpertRoutes.empty(SHAPE), [planned])
    assert inputs.input_ids.tolist() == [30, 31, 32, 20]
    assert (inputs.num_gate_tokens, inputs.cu_seqlens_q) == (3, (0, 3, 4))


@pytest.mark.parametrize(
    ("chunks", "evicted", "reason"),
    [
        ([replace(CHUNKS[0], fragment_ids=[3])], [], "seq 4 names 1 plan fragments and route 1"),
        ([PLANNED_CHUNKS[0]], [9, 8], r"names and evicts plan fragments \[8\]"),
        ([CHUNKS[3], CHUNKS[1]], [], r"ranks are \[1, 0\]"),
    ],
)
def test_what_a_descriptor_shows_of_bad_plans_is_refused(
    chunks: list[ChunkSpec], evicted: list[int], reason: str
) -> None:
    with pytest.raises(StepRefusedError, match=reason):
        check_step(make_step(0, chunks, evicted_fragment_ids=evicted), LIMITS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fragment_lens": np.array([2, 0, 0], np.int32)}, "fragment_ids has 3 entries"),
        ({"fragment_lens": np.array([3, 0], np.int32)}, "fragment_lens has 2 entries"),
        ({"fragment_lens": np.array([4, -1, 0], np.int32)}, "fragment_lens holds -1"),
        ({"fragment_ids": np.zeros(3, np.int64)}, "fragment_ids is int64"),
        ({"evicted_fragment_ids": np.zeros(1, np.int64)}, "evicted_fragment_ids is int64"),
    ],
)
def test_fragment_columns_that_do_not_fit_together_are_refused(
    changes: dict[str, np.ndarray], reason: str
) -> None:
    step = msgspec.structs.replace(make_step(0, PLANNED_CHUNKS), **changes)
    with pytest.raises(StepRefusedError, match=reason):
        check_step(step, LIMITS)
