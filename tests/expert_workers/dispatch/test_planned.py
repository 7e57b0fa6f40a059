"""Planned dispatch against negotiated dispatch: the same tensors without an exchange, the same bytes over gloo."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from cluster.worker_messages import SentTraffic
from expert_workers.dispatch.negotiated import NegotiatedDispatcher
from expert_workers.dispatch.planned import LayerFormat, PlannedLayer, planned_layer
from expert_workers.exchange.counting import CountingExchange
from expert_workers.exchange.density import all_to_all_pays
from expert_workers.model.experts import ExpertLayout, apply_experts, run_experts
from expert_workers.model.numerics import DeterministicNumerics, FastNumerics, Numerics
from expert_workers.model.weights import ExpertWeights
from tests.expert_workers.dispatch.plan_cases import (
    CPU,
    NegotiatedLayer,
    PlanCase,
    even_case,
    joined,
    negotiated_layers,
    plan_step,
    random_case,
)
from tests.helpers.ranks import RankContext, run_ranks

HIDDEN = 24
INTERMEDIATE = 16


SEEDS = range(40, 90)


def num_sources(case: PlanCase) -> int:
    """With tokens."""
    return sum(case.routes_of(source).num_tokens > 0 for source in range(case.ep_size))


def test_random_cases_have_any_number_of_ranks_also_with_all_tokens_on_one() -> None:
    cases = [random_case(seed) for seed in SEEDS]
    assert {case.ep_size for case in cases} == {1, 2, 3, 4, 8, 16}
    assert {2, 3, 4, 8, 16} == {case.ep_size for case in cases if num_sources(case) > 1}
    assert {8, 16} <= {case.ep_size for case in cases if num_sources(case) == 1}


@pytest.mark.parametrize("min_group_rows", [1, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_has_the_rows_splits_and_expert_layout_of_a_negotiation(
    seed: int, min_group_rows: int
) -> None:
    case = random_case(seed)
    layer_format = LayerFormat(case.shape.num_experts_per_tok, min_group_rows, CPU)
    plans = [joined(case, rank) for rank in range(case.ep_size)]
    for layer in range(case.shape.num_moe_layers):
        for plan, expected in zip(
            plans, negotiated_layers(case, layer, min_group_rows), strict=True
        ):
            check_same_layer(planned_layer(plan[layer], layer_format), expected)


def check_same_layer(planned: PlannedLayer, expected: NegotiatedLayer) -> None:
    assert planned.splits == expected.splits
    check_same(planned.rows.token_indices, expected.rows.token_indices)
    check_same(planned.rows.destinations, expected.rows.destinations)
    assert planned.layout.num_ordinals == expected.layout.num_ordinals
    for name in {field.name for field in fields(ExpertLayout)} - {"num_ordinals"}:
        check_same(getattr(planned.layout, name), getattr(expected.layout, name))


def check_same(a: Tensor, b: Tensor) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize("seed", range(10))
def test_the_expert_load_of_a_plan_counts_every_choice_once(seed: int) -> None:
    case = random_case(seed)
    steps = [plan_step(case, rank) for rank in range(case.ep_size)]
    num_choices = sum(case.routes_of(source).topk_ids.size for source in range(case.ep_size))
    assert sum(int(step.expert_load.sum()) for step in steps if step is not None) == num_choices


@dataclass(frozen=True)
class Outcome:
    """One rank. same: every layer's result is that of negotiation to the byte; traffic of each dispatch and combine."""

    same: list[bool]
    planned: list[tuple[SentTraffic, SentTraffic]]
    num_negotiated_messages: int


def both_ways(case: PlanCase, make_numerics: Callable[[], Numerics]) -> list[Outcome]:
    def run(context: RankContext) -> Outcome:
        numerics = make_numerics()
        exchange = CountingExchange(context.exchange(), context.rank)
        weights = make_weights(case, context.rank)
        step = plan_step(
            case, context.rank, exchange=exchange, min_group_rows=numerics.min_group_rows
        )
        assert step is not None
        same, planned, negotiated = [], [], 0
        for layer in range(case.shape.num_moe_layers):
            x = make_hidden(case, context.rank, layer)
            expected = negotiate(case, context.rank, layer, exchange, weights, numerics)
            negotiated += exchange.take().messages
            received = step.dispatch(layer, x)
            dispatch = exchange.take()
            y = apply_experts(received, step.layout(layer), weights, numerics)
            combined = step.combine(layer, y)
            planned.append((dispatch, exchange.take()))
            same.append(combined.numpy().tobytes() == expected.numpy().tobytes())
            assert combined.shape == x.shape
        return Outcome(same, planned, negotiated)

    return run_ranks(case.ep_size, run)


def negotiate(
    case: PlanCase,
    rank: int,
    layer: int,
    exchange: CountingExchange,
    weights: ExpertWeights,
    numerics: Numerics,
) -> Tensor:
    routes = case.routes_of(rank)
    dispatcher = NegotiatedDispatcher(case.placement, exchange, CPU)
    tokens = dispatcher.dispatch(
        make_hidden(case, rank, layer),
        torch.from_numpy(routes.topk_ids[:, layer].astype("int64")),
        torch.from_numpy(routes.topk_weights[:, layer]),
        torch.from_numpy(case.positions_of(rank)),
    )
    return dispatcher.combine(run_experts(tokens, weights, numerics), tokens.handle)


def make_weights(case: PlanCase, rank: int) -> ExpertWeights:
    """A copy of a logical expert is the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    num_experts = case.placement.num_experts
    gate_up = torch.randn(num_experts, 2 * INTERMEDIATE, HIDDEN, generator=generator)
    down = torch.randn(num_experts, HIDDEN, INTERMEDIATE, generator=generator)
    local = torch.from_numpy(case.placement.local_experts(rank)).long()
    return ExpertWeights(gate_up=gate_up[local] / 8, down=down[local] / 8)


def make_hidden(case: PlanCase, rank: int, layer: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + layer)
    return torch.randn(case.routes_of(rank).num_tokens, HIDDEN, generator=generator)


def expected_traffic(case: PlanCase, rank: int) -> list[tuple[SentTraffic, SentTraffic]]:
    """One message per pair of two ranks with rows, or where that pays to every rank; each row once there and back."""
    traffic = []
    for layer in range(case.shape.num_moe_layers):
        rows = case.pair_rows(layer)
        rows[range(case.ep_size), range(case.ep_size)] = 0
        there, back = rows[rank], rows[:, rank]
        if all_to_all_pays(int((rows > 0).sum()), case.ep_size):
            num_messages = case.ep_size - 1, case.ep_size - 1
        else:
            num_messages = int((there > 0).sum()), int((back > 0).sum())
        traffic.append(
            (
                SentTraffic(num_messages[0], int(there.sum()) * HIDDEN * 4),
                SentTraffic(num_messages[1], int(back.sum()) * HIDDEN * 4),
            )
        )
    return traffic


def check_both_ways(case: PlanCase, make_numerics: Callable[[], Numerics] = FastNumerics) -> None:
    for rank, outcome in enumerate(both_ways(case, make_numerics)):
        assert outcome.same == [True] * case.shape.num_moe_layers
        assert outcome.planned == expected_traffic(case, rank)


@pytest.mark.parametrize("make_numerics", [FastNumerics, DeterministicNumerics])
@pytest.mark.parametrize(
    "tokens_of_source",
    [[[7, 5], [6]], [[], [9]], [[3], [0], [1, 8], []], [[], [], [], [1]]],
    ids=["two ranks", "an idle rank", "four ranks, one of no tokens", "one token on four ranks"],
)
def test_a_planned_layer_is_a_negotiated_one_to_the_byte_with_one_message_per_pair(
    tokens_of_source: list[list[int]], make_numerics: Callable[[], Numerics]
) -> None:
    check_both_ways(even_case(1, tokens_of_source), make_numerics)


def test_eight_ranks_on_a_shuffled_placement_with_redundant_copies() -> None:
    case = random_case(6, ep_size=8)
    assert len(case.placement.physical_to_logical_map) > case.placement.num_experts
    check_both_ways(case)


@pytest.mark.parametrize(("ep_size", "seed"), [(2, 10), (3, 9), (4, 9), (4, 12), (8, 8)])
def test_random_cases_are_negotiated_ones_to_the_byte(ep_size: int, seed: int) -> None:
    case = random_case(seed, ep_size=ep_size)
    assert num_sources(case) > 1
    check_both_ways(case)


@pytest.mark.parametrize(("ep_size", "seed"), [(4, 6), (8, 9), (16, 6)])
def test_one_rank_that_is_the_source_of_everything_is_served_to_the_byte(
    ep_size: int, seed: int
) -> None:
    case = random_case(seed, ep_size=ep_size)
    assert num_sources(case) == 1
    check_both_ways(case)


def dense_and_sparse_case() -> PlanCase:
    """Eight ranks: in the first layer all pairs have rows, in the second only those to rank 0."""
    case = even_case(6, [[24]] * 8, k=2)
    for (routes,) in case.routes:
        routes.topk_ids[:, 1] = [0, 1]
    return case


def test_every_rank_finds_the_same_number_of_pairs_with_rows_and_the_same_way_for_them() -> None:
    dense, sparse = zip(*(joined(dense_and_sparse_case(), rank) for rank in range(8)), strict=True)
    layer_format = LayerFormat(num_ordinals=2, min_group_rows=1, device=CPU)
    assert [plan.num_rank_pairs for plan in (*dense, *sparse)] == [56] * 8 + [7] * 8
    assert {planned_layer(plan, layer_format).by_all_to_all for plan in dense} == {True}
    assert {planned_layer(plan, layer_format).by_all_to_all for plan in sparse} == {False}


def test_a_dense_layer_by_all_to_all_and_a_sparse_one_by_pairs_are_negotiated_ones_to_the_byte() -> (
    None
):
    check_both_ways(dense_and_sparse_case(), DeterministicNumerics)


def test_a_dense_layer_is_one_all_to_all_there_and_one_back_and_a_sparse_one_messages() -> None:
    case = dense_and_sparse_case()
    first, *others = run_ranks(8, lambda context: gloo_calls(case, context))
    assert first == {"gloo:all_to_all": 2, "gloo:send": 7, "gloo:recv": 7}
    assert others == [{"gloo:all_to_all": 2, "gloo:send": 1, "gloo:recv": 1}] * 7


def test_sparse_routes_leave_most_pairs_without_a_message() -> None:
    case = even_case(5, [[1], [], [1], []], num_experts=8, k=1)
    outcomes = both_ways(case, FastNumerics)
    planned = [there.messages + back.messages for o in outcomes for there, back in o.planned]
    negotiated = [outcome.num_negotiated_messages for outcome in outcomes]
    assert 0 < sum(planned) <= 2 * 2 * 2  # two layers, two tokens, there and back
    assert negotiated == [2 * 3 * 3] * 4  # two layers, three exchanges, three peers


def test_gloo_sends_what_the_plan_says_and_starts_no_collective() -> None:
    case = even_case(2, [[2], [], [3], []])
    for rank, calls in enumerate(run_ranks(4, lambda context: gloo_calls(case, context))):
        sent = sum(a.messages + b.messages for a, b in expected_traffic(case, rank))
        assert sent > 0
        assert calls == {"gloo:send": sent, "gloo:recv": sent}


def gloo_calls(case: PlanCase, context: RankContext) -> dict[str, int]:
    """What one rank's planned layers start, by name."""
    step = plan_step(case, context.rank, exchange=context.exchange())
    assert step is not None
    with profile() as profiler:
        for layer in range(case.shape.num_moe_layers):
            received = step.dispatch(layer, make_hidden(case, context.rank, layer))
            step.combine(layer, received)
    events = profiler.key_averages()
    return {event.key: event.count for event in events if event.key.startswith("gloo:")}
