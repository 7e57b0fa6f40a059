"""Counting the rows that a rank's experts serve."""

import numpy as np
import torch

from cluster.placement import ExpertPlacement
from expert_workers.dispatch.load import LoadCountingDispatcher
from expert_workers.dispatch.local import LocalDispatcher
from expert_workers.dispatch.negotiated import NegotiatedDispatcher
from tests.expert_workers.dispatch.moe_cases import NUM_EXPERTS, dispatch, make_tokens
from tests.helpers.placements import redundant_placement
from tests.helpers.ranks import RankContext, run_ranks

CPU = torch.device("cpu")


def test_load_is_counted_per_layer_and_starts_anew_once_taken() -> None:
    dispatcher = LoadCountingDispatcher(
        LocalDispatcher(ExpertPlacement.contiguous(NUM_EXPERTS, 1), CPU), NUM_EXPERTS
    )
    layers = [make_tokens(num_tokens, seed=num_tokens) for num_tokens in (5, 0)]
    for tokens in layers:
        dispatch(dispatcher, tokens)
    load = dispatcher.take_load()
    assert load[0].tolist() == layers[0].topk_ids.flatten().bincount(minlength=8).tolist()
    assert load[1].tolist() == [0] * NUM_EXPERTS
    assert dispatcher.take_load().shape == (0, NUM_EXPERTS)


def test_a_rank_counts_the_rows_of_all_ranks_that_its_own_experts_serve() -> None:
    placement = ExpertPlacement.contiguous(NUM_EXPERTS, 2)
    tokens = [make_tokens(4 + rank, seed=rank) for rank in range(2)]

    def count(context: RankContext) -> list[list[int]]:
        inner = NegotiatedDispatcher(placement, context.exchange(), CPU)
        dispatcher = LoadCountingDispatcher(inner, placement.num_physical_per_rank)
        mine = tokens[context.rank]
        received = dispatch(dispatcher, mine)
        dispatcher.combine(received.x, received.handle)
        return dispatcher.take_load().tolist()

    chosen = torch.cat([t.topk_ids for t in tokens]).flatten().bincount(minlength=8).tolist()
    assert run_ranks(2, count) == [[chosen[:4]], [chosen[4:]]]


def test_each_copy_of_an_expert_counts_the_rows_that_it_serves() -> None:
    placement = redundant_placement(NUM_EXPERTS, 2, seed=2)
    tokens = [make_tokens(6 + rank, seed=rank) for rank in range(2)]

    def count(context: RankContext) -> list[list[int]]:
        inner = NegotiatedDispatcher(placement, context.exchange(), CPU)
        dispatcher = LoadCountingDispatcher(inner, placement.num_physical_per_rank)
        received = dispatch(dispatcher, tokens[context.rank])
        dispatcher.combine(received.x, received.handle)
        return dispatcher.take_load().tolist()

    served = [placement.physical_ids(t.topk_ids.numpy(), t.positions.numpy()) for t in tokens]
    num_physical = len(placement.physical_to_logical_map)
    expected = np.bincount(np.concatenate(served).ravel(), minlength=num_physical).tolist()
    per_rank = placement.num_physical_per_rank
    assert num_physical > NUM_EXPERTS
    assert run_ranks(2, count) == [[expected[:per_rank]], [expected[per_rank:]]]
