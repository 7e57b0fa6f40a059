"""Dispatch within one rank."""

import pytest
import torch

from cluster.placement import ExpertPlacement
from expert_workers.dispatch.local import LocalDispatcher
from tests.expert_workers.dispatch.moe_cases import (
    NUM_EXPERTS,
    expected,
    local_experts,
    make_tokens,
    moe_layer,
)
from tests.helpers.placements import redundant_placement

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_one_rank_serves_all_its_tokens_without_any_exchange(num_tokens: int) -> None:
    placement = ExpertPlacement.contiguous(NUM_EXPERTS, 1)
    tokens = make_tokens(num_tokens, seed=4)
    result = moe_layer(LocalDispatcher(placement, CPU), local_experts(placement, 0), tokens)
    torch.testing.assert_close(result, expected(tokens))


def test_one_rank_may_hold_several_copies_of_an_expert() -> None:
    placement = redundant_placement(NUM_EXPERTS, 1, seed=3)
    tokens = make_tokens(9, seed=4)
    result = moe_layer(LocalDispatcher(placement, CPU), local_experts(placement, 0), tokens)
    assert len(placement.physical_to_logical_map) > NUM_EXPERTS
    torch.testing.assert_close(result, expected(tokens))


def test_a_placement_over_several_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="the placement has 2"):
        LocalDispatcher(ExpertPlacement.contiguous(NUM_EXPERTS, 2), CPU)
