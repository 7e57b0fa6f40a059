"""Negotiated dispatch over gloo against the dense oracle, with the neighbourhoods that break such code."""

import os
import signal
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.placement import ExpertPlacement
from expert_workers.dispatch.negotiated import NegotiatedDispatcher
from expert_workers.exchange.base import ExchangeError
from tests.expert_workers.dispatch.moe_cases import (
    EXPERTS_PER_TOK,
    NUM_EXPERTS,
    Tokens,
    dispatch,
    expected,
    local_experts,
    make_tokens,
    moe_layer,
)
from tests.helpers.ranks import RankContext, run_ranks

CPU = torch.device("cpu")


def layer_results(ep_size: int, tokens_of_rank: list[list[Tokens]]) -> list[list[Tensor]]:
    """Results by rank and round; `tokens_of_rank[r]` are the tokens of rank r, round after round."""
    placement = ExpertPlacement.contiguous(NUM_EXPERTS, ep_size)

    def run_rounds(context: RankContext) -> list[np.ndarray]:
        dispatcher = NegotiatedDispatcher(placement, context.exchange(), CPU)
        experts = local_experts(placement, context.rank)
        rounds = tokens_of_rank[context.rank]
        return [moe_layer(dispatcher, experts, tokens).float().numpy() for tokens in rounds]

    answers = run_ranks(ep_size, run_rounds)
    return [[torch.from_numpy(array) for array in arrays] for arrays in answers]


def check_against_oracle(tokens_of_rank: list[list[Tokens]], tolerance: float = 1e-5) -> None:
    results = layer_results(len(tokens_of_rank), tokens_of_rank)
    for rounds, arrays in zip(tokens_of_rank, results, strict=True):
        for tokens, result in zip(rounds, arrays, strict=True):
            assert result.shape == tokens.x.shape
            torch.testing.assert_close(result, expected(tokens), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_every_token_gets_the_sum_over_its_experts_on_all_ranks(ep_size: int) -> None:
    check_against_oracle([[make_tokens(5 + rank, seed=rank)] for rank in range(ep_size)])


def test_bfloat16_rows_come_back_within_bfloat16_rounding() -> None:
    tokens = [[make_tokens(6, seed=rank, dtype=torch.bfloat16)] for rank in range(2)]
    check_against_oracle(tokens, tolerance=4e-2)


def test_idle_ranks_take_part_with_zero_tokens() -> None:
    check_against_oracle([[make_tokens(n, seed=n)] for n in (0, 7, 0, 0)])


def test_fewer_tokens_than_ranks_are_served() -> None:
    check_against_oracle([[make_tokens(n, seed=n)] for n in (1, 0, 1, 0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_without_any_token_keeps_dtype_and_width(dtype: torch.dtype) -> None:
    placement = ExpertPlacement.contiguous(NUM_EXPERTS, 2)
    nothing = make_tokens(0, seed=0, dtype=dtype)

    def shapes(context: RankContext) -> tuple[object, ...]:
        dispatcher = NegotiatedDispatcher(placement, context.exchange(), CPU)
        received = dispatch(dispatcher, nothing)
        combined = dispatcher.combine(received.x, received.handle)
        return (
            tuple(received.x.shape),
            received.x.dtype == dtype,
            tuple(received.expert_ids.shape),
            tuple(combined.shape),
            combined.dtype == dtype,
        )

    width = nothing.x.shape[1]
    assert run_ranks(2, shapes) == [((0, width), True, (0, 3), (0, width), True)] * 2


@pytest.mark.parametrize("ep_size", [2, 4])
def test_all_tokens_may_go_to_one_rank_and_then_none_to_it_but_all_to_another(ep_size: int) -> None:
    """Every rank is the only one once, right after and right before another is."""
    per_rank = NUM_EXPERTS // ep_size
    turns = [*range(ep_size), 0]
    check_against_oracle(
        [
            [
                make_tokens(
                    6,
                    seed=10 * rank + turn,
                    experts=range(target * per_rank, (target + 1) * per_rank),
                    experts_per_tok=min(per_rank, EXPERTS_PER_TOK),
                )
                for turn, target in enumerate(turns)
            ]
            for rank in range(ep_size)
        ]
    )


def test_random_rounds_of_uneven_loads_match_the_oracle() -> None:
    sizes = np.random.default_rng(5).integers(0, 9, size=(4, 12))
    check_against_oracle(
        [
            [make_tokens(int(n), seed=100 * rank + i) for i, n in enumerate(row)]
            for rank, row in enumerate(sizes)
        ]
    )


def test_a_token_with_several_experts_on_one_rank_sends_it_one_row() -> None:
    placement = ExpertPlacement.contiguous(NUM_EXPERTS, 2)
    tokens = make_tokens(5, seed=3, experts=range(4))

    def received_rows(context: RankContext) -> tuple[int, int]:
        dispatcher = NegotiatedDispatcher(placement, context.exchange(), CPU)
        received = dispatch(dispatcher, tokens)
        dispatcher.combine(received.x, received.handle)
        return received.x.shape[0], int((received.expert_ids >= 0).sum())

    assert run_ranks(2, received_rows) == [(10, 30), (0, 0)]


def test_rows_arrive_in_source_rank_order_with_their_own_metadata() -> None:
    placement = ExpertPlacement.contiguous(NUM_EXPERTS, 2)
    tokens = [make_tokens(4, seed=rank, experts=range(3, 8)) for rank in range(2)]

    def received_fields(context: RankContext) -> list[np.ndarray]:
        mine = tokens[context.rank]
        dispatcher = NegotiatedDispatcher(placement, context.exchange(), CPU)
        received = dispatch(dispatcher, mine)
        dispatcher.combine(received.x, received.handle)
        fields = (received.x, received.expert_ids, received.expert_weights)
        return [field.numpy() for field in fields]

    x, expert_ids, weights = run_ranks(2, received_fields)[1]
    sent_ids = torch.cat([t.topk_ids for t in tokens]).numpy()
    sent_weights = torch.cat([t.topk_weights for t in tokens]).numpy()
    np.testing.assert_array_equal(x, torch.cat([t.x for t in tokens]).numpy())
    np.testing.assert_array_equal(expert_ids, np.where(sent_ids >= 4, sent_ids - 4, -1))
    np.testing.assert_array_equal(weights, np.where(sent_ids >= 4, sent_weights, 0))


def test_a_tokens_result_has_the_same_bytes_whatever_its_neighbours_are() -> None:
    tokens = make_tokens(3, seed=1)
    nothing = make_tokens(0, seed=0)
    crowd = make_tokens(9, seed=2)
    together = Tokens(
        *(
            torch.cat([neighbour, mine])
            for neighbour, mine in (
                (crowd.x, tokens.x),
                (crowd.topk_ids, tokens.topk_ids),
                (crowd.topk_weights, tokens.topk_weights),
                (crowd.positions, tokens.positions),
            )
        )
    )
    busy = [[make_tokens(4, seed=10 + rank)] for rank in range(3)]
    alone = layer_results(4, [[tokens], [nothing], [nothing], [nothing]])[0][0]
    crowded = layer_results(4, [[together], *busy])[0][0]
    assert crowded[-3:].numpy().tobytes() == alone.numpy().tobytes()


@pytest.mark.parametrize("rows_sent_before", [False, True])
def test_a_rank_killed_mid_exchange_makes_the_others_raise_in_bounded_time(
    rows_sent_before: bool,
) -> None:
    tokens = make_tokens(4, seed=7)
    placement = ExpertPlacement.contiguous(NUM_EXPERTS, 4)

    def seconds_until_error(context: RankContext) -> float:
        dispatcher = NegotiatedDispatcher(placement, context.exchange(), CPU)
        experts = local_experts(placement, context.rank)
        moe_layer(dispatcher, experts, tokens)
        if context.rank == 1:
            if rows_sent_before:
                dispatch(dispatcher, tokens)
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(ExchangeError, match=f"rank {context.rank}: exchange of"):
            moe_layer(dispatcher, experts, tokens)
        return time.monotonic() - started

    answers = run_ranks(
        4, seconds_until_error, exchange_timeout_seconds=5.0, may_die=frozenset({1})
    )
    assert answers[1] is None
    assert all(answers[rank] < 10.0 for rank in (0, 2, 3))


def test_a_rank_that_lives_but_does_not_come_is_an_error_after_the_timeout() -> None:
    tokens = make_tokens(4, seed=7)
    placement = ExpertPlacement.contiguous(NUM_EXPERTS, 2)

    def seconds_until_error(context: RankContext) -> float:
        dispatcher = NegotiatedDispatcher(placement, context.exchange(), CPU)
        store = context.store("given-up")
        if context.rank == 1:
            store.wait(["rank 0 gave up"])
            return 0.0
        started = time.monotonic()
        with pytest.raises(
            ExchangeError, match=r"rank 0: exchange of counts failed: .*[Tt]imed out"
        ):
            moe_layer(dispatcher, local_experts(placement, 0), tokens)
        store.set("rank 0 gave up", "")
        return time.monotonic() - started

    waited, _ = run_ranks(2, seconds_until_error, exchange_timeout_seconds=0.5)
    assert 0.4 < waited < 5.0
