"""Joined plans against a count by hand: token by token, choice by choice, for all ranks in one place."""

from dataclasses import dataclass

import numpy as np
import pytest

from cluster.placement import ExpertPlacement
from expert_workers.step_plan import LayerPlan, join_parts
from tests.expert_workers.dispatch.plan_cases import PlanCase, even_case, joined, random_case


@dataclass(frozen=True)
class CountedLayer:
    """One rank's layer. pairs: (local expert, row, number among the row's, weight), sorted."""

    send_tokens: list[list[int]]
    recv_counts: list[int]
    num_rank_pairs: int
    pairs: list[tuple[int, int, int, float]]


def serving_copy(placement: ExpertPlacement, expert: int, position: int) -> int:
    copies = np.flatnonzero(placement.physical_to_logical_map == expert).tolist()
    return copies[(position + expert) % len(copies)]


def counted(case: PlanCase, rank: int, layer: int) -> CountedLayer:
    per_rank = case.placement.num_physical_per_rank
    tokens = [
        [
            sorted(
                (serving_copy(case.placement, expert, position), weight)
                for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True)
            )
            for ids, weights, position in zip(
                case.routes_of(source).topk_ids[:, layer],
                case.routes_of(source).topk_weights[:, layer],
                case.positions_of(source).tolist(),
                strict=True,
            )
        ]
        for source in range(case.ep_size)
    ]
    send_tokens = [
        [
            i
            for i, choices in enumerate(tokens[rank])
            if any(p // per_rank == to for p, _ in choices)
        ]
        for to in range(case.ep_size)
    ]
    rank_pairs = {
        (source, p // per_rank)
        for source, of_source in enumerate(tokens)
        for choices in of_source
        for p, _ in choices
        if p // per_rank != source
    }
    arrived = [
        [[(p % per_rank, w) for p, w in choices if p // per_rank == rank] for choices in of_source]
        for of_source in tokens
    ]
    rows = [here for of_source in arrived for here in of_source if here]
    return CountedLayer(
        send_tokens,
        [sum(bool(here) for here in of_source) for of_source in arrived],
        len(rank_pairs),
        sorted((e, row, i, w) for row, here in enumerate(rows) for i, (e, w) in enumerate(here)),
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_joined_plan_has_every_row_and_pair_in_the_order_of_a_dispatch(seed: int) -> None:
    case = random_case(seed)
    for rank in range(case.ep_size):
        for layer, plan in enumerate(joined(case, rank)):
            expected = counted(case, rank, layer)
            assert plan.send_tokens.tolist() == [
                t for tokens in expected.send_tokens for t in tokens
            ]
            assert plan.send_counts.tolist() == [len(tokens) for tokens in expected.send_tokens]
            assert plan.recv_counts.tolist() == expected.recv_counts
            assert plan.num_rank_pairs == expected.num_rank_pairs
            experts = np.repeat(np.arange(len(plan.pair_counts)), plan.pair_counts).tolist()
            columns = (plan.pair_rows, plan.pair_ranks, plan.pair_weights)
            pairs = zip(experts, *(column.tolist() for column in columns), strict=True)
            assert list(pairs) == expected.pairs


def test_one_run_of_tokens_is_joined_alike_however_it_was_cut() -> None:
    whole = even_case(3, [[9], [4]])
    cut = PlanCase(
        whole.placement,
        whole.shape,
        [
            [run.slice(0, 2), run.slice(2, 2), run.slice(2, run.num_tokens)]
            for (run,) in whole.routes
        ],
        first_positions=[[0, 2, 2]] * 2,
    )
    for rank in range(2):
        for a, b in zip(joined(whole, rank), joined(cut, rank), strict=True):
            for name in LayerPlan.__dataclass_fields__:
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)


def test_without_fragments_every_layer_is_empty_and_has_its_dtypes() -> None:
    plans = join_parts([], [], num_layers=2, num_experts=3, ep_size=4)
    assert [plan.send_counts.tolist() for plan in plans] == [[0] * 4] * 2
    assert [plan.recv_counts.tolist() for plan in plans] == [[0] * 4] * 2
    assert [plan.pair_counts.tolist() for plan in plans] == [[0] * 3] * 2
    assert {plan.pair_rows.dtype for plan in plans} == {np.dtype(np.int64)}
    assert {plan.pair_weights.dtype for plan in plans} == {np.dtype(np.float32)}
