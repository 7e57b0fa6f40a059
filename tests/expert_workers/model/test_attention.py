from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from expert_workers.kv_pool import KVPool
from expert_workers.model.attention import AttentionPlan, LayerRows, attend
from expert_workers.model.gqa import HeadRows
from expert_workers.model.mla import LatentRows
from expert_workers.model.numerics import DeterministicNumerics, FastNumerics, Numerics
from expert_workers.model.rotary import RotaryTable
from expert_workers.step_inputs import StepInputs
from tests.reference.naive_attention import naive_attention

CPU = torch.device("cpu")
NUMERICS = [FastNumerics(), DeterministicNumerics()]
NAMES = ["fast", "deterministic"]
WIDTH, VALUE_WIDTH, NUM_HEADS = 20, 12, 3
"""Of the latent form: one row for all heads."""


@dataclass(frozen=True)
class Sequence:
    """num_rows: with this step's; num_tokens: how many of them are this step's."""

    num_rows: int
    num_tokens: int


@dataclass(frozen=True)
class Heads:
    """num_kv_heads of keys and of values, each `width` wide."""

    num_heads: int
    num_kv_heads: int
    width: int


GROUPED = [
    Heads(4, 2, 8),
    Heads(4, 1, 8),
    Heads(3, 3, 10),
    Heads(3, 1, 6),
    Heads(1, 1, 2),
    Heads(16, 2, 6),
]


@dataclass(frozen=True, eq=False)
class Case:
    """heads: None in the latent form."""

    pool: KVPool
    inputs: StepInputs
    queries: Tensor
    slots: list[Tensor]
    heads: Heads | None

    @property
    def kv_rows(self) -> LayerRows:
        if self.heads is None:
            return LatentRows(self.pool, 0, VALUE_WIDTH)
        return HeadRows(self.pool, 0, self.heads.num_kv_heads, self.heads.width)


def make_case(
    sequences: list[Sequence],
    block_size: int,
    filler: float = 0.0,
    heads: Heads | None = None,
) -> Case:
    """Random rows for every sequence in scattered blocks; every other slot of the pool holds `filler`."""
    generator = torch.Generator().manual_seed(4)
    width = WIDTH if heads is None else 2 * heads.num_kv_heads * heads.width
    num_blocks = [-(-s.num_rows // block_size) for s in sequences]
    pool = KVPool(
        num_layers=1,
        num_blocks=sum(num_blocks) + 3,
        block_size=block_size,
        width=width,
        dtype=torch.float32,
        device=CPU,
    )
    pool.rows.fill_(filler)
    tables = torch.randperm(pool.num_blocks, generator=generator)[3:].split(num_blocks)
    slots = [
        (table[:, None] * block_size + torch.arange(block_size)).flatten()[: s.num_rows]
        for s, table in zip(sequences, tables, strict=True)
    ]
    for chosen in slots:
        pool.write(0, chosen, torch.randn(len(chosen), width, generator=generator))
    ends = torch.tensor([0, *[s.num_tokens for s in sequences]]).cumsum(0).tolist()
    positions = torch.cat([torch.arange(s.num_rows - s.num_tokens, s.num_rows) for s in sequences])
    empty = torch.zeros(0, 1, 1)
    inputs = StepInputs(
        input_ids=positions,
        positions=positions,
        slot_mapping=positions,
        cu_seqlens_q=tuple(ends),
        seq_lens=tuple(s.num_rows for s in sequences),
        block_tables=tuple(tables),
        num_gate_tokens=ends[-1],
        replay_topk_ids=empty.to(torch.int64),
        replay_topk_weights=empty,
        last_token_indices=torch.zeros(0, dtype=torch.int64),
    )
    query_shape = (NUM_HEADS, WIDTH) if heads is None else (heads.num_heads, heads.width)
    queries = torch.randn(ends[-1], *query_shape, generator=generator)
    return Case(pool, inputs, queries, slots, heads)


def attended(case: Case, numerics: Numerics) -> Tensor:
    table = RotaryTable(torch.ones(1), 1.0, 2048)
    rotation = table.at(case.inputs.positions, torch.float32)
    plan = AttentionPlan.of(case.inputs, rotation, case.pool.block_size)
    return attend(plan, case.queries, case.kv_rows, numerics)


def expected_values(case: Case) -> Tensor:
    chunks = []
    starts = case.inputs.cu_seqlens_q
    for slots, start, end in zip(case.slots, starts[:-1], starts[1:], strict=True):
        rows = case.pool.rows[0, slots]
        for token in range(start, end):
            visible = rows[: int(case.inputs.positions[token]) + 1]
            chunks.append(_expected_heads(case, token, visible))
    return torch.stack(chunks).to(torch.float32)


def _expected_heads(case: Case, token: int, rows: Tensor) -> Tensor:
    """rows: [n, width], those that the token sees. Returns [Hd, v]."""
    queries, heads = case.queries[token], case.heads
    if heads is None:
        return torch.stack(
            [naive_attention(query, rows, rows[:, :VALUE_WIDTH]) for query in queries]
        )
    keys, values = rows.view(len(rows), 2, heads.num_kv_heads, heads.width).unbind(1)
    num_sharing = heads.num_heads // heads.num_kv_heads
    return torch.stack(
        [
            naive_attention(query, keys[:, head // num_sharing], values[:, head // num_sharing])
            for head, query in enumerate(queries)
        ]
    )


MIXED = [
    Sequence(1, 1),
    Sequence(200, 1),
    Sequence(70, 70),
    Sequence(64, 1),
    Sequence(330, 140),
    Sequence(65, 2),
]


@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
@pytest.mark.parametrize("block_size", [1, 16, 24, 100])
def test_mixed_steps_equal_naive_attention(numerics: Numerics, block_size: int) -> None:
    case = make_case(MIXED, block_size)
    torch.testing.assert_close(
        attended(case, numerics), expected_values(case), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
def test_what_unused_slots_hold_never_shows(numerics: Numerics) -> None:
    clean, dirty = make_case(MIXED, 24), make_case(MIXED, 24, filler=float("nan"))
    assert torch.equal(attended(dirty, numerics), attended(clean, numerics))


@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
@pytest.mark.parametrize("heads", GROUPED, ids=str)
def test_heads_that_share_keys_and_values_equal_naive_attention(
    numerics: Numerics, heads: Heads
) -> None:
    case = make_case(MIXED, 16, filler=float("nan"), heads=heads)
    torch.testing.assert_close(
        attended(case, numerics), expected_values(case), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("heads", [None, *GROUPED], ids=str)
def test_deterministic_results_are_the_same_alone_and_among_others(heads: Heads | None) -> None:
    case = make_case(MIXED, 16, heads=heads)
    numerics = DeterministicNumerics()
    together = attended(case, numerics)
    starts = case.inputs.cu_seqlens_q
    for index, (start, end) in enumerate(pairwise(starts)):
        for first, last in ((start, end), (end - 1, end)):
            alone = _alone(case, index, first, last)
            assert torch.equal(attended(alone, numerics), together[first:last])


def _alone(case: Case, index: int, start: int, end: int) -> Case:
    """A step that holds tokens [start, end) of one sequence only; they must be its last ones."""
    inputs = StepInputs(
        input_ids=case.inputs.input_ids[start:end],
        positions=case.inputs.positions[start:end],
        slot_mapping=case.inputs.slot_mapping[start:end],
        cu_seqlens_q=(0, end - start),
        seq_lens=(case.inputs.seq_lens[index],),
        block_tables=(case.inputs.block_tables[index],),
        num_gate_tokens=end - start,
        replay_topk_ids=case.inputs.replay_topk_ids,
        replay_topk_weights=case.inputs.replay_topk_weights,
        last_token_indices=case.inputs.last_token_indices,
    )
    return Case(case.pool, inputs, case.queries[start:end], [case.slots[index]], case.heads)


def test_step_without_tokens_has_no_spans() -> None:
    case = make_case([Sequence(5, 1)], 16)
    empty = case.inputs.positions[:0]
    inputs = StepInputs(empty, empty, empty, (0,), (), (), 0, *[torch.zeros(0, 1, 1)] * 2, empty)
    rotation = RotaryTable(torch.ones(1), 1.0, 8).at(empty, torch.float32)
    assert AttentionPlan.of(inputs, rotation, 16).spans == ()
