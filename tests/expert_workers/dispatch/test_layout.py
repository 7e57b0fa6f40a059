"""The pure part of a dispatch: who gets which rows and how a row is packed."""

import numpy as np
import pytest
import torch

from cluster.placement import ExpertPlacement
from expert_workers.dispatch.layout import (
    ExpertLocations,
    RowFormat,
    SentRows,
    expert_lookup,
    local_choices,
    pack_rows,
    sent_rows,
    sum_over_ranks,
    unpack_rows,
    wanted_rows,
)
from expert_workers.exchange.base import RowSplits
from tests.expert_workers.dispatch.plan_cases import random_case

CPU = torch.device("cpu")
TOPK_IDS = torch.tensor([[0, 1], [1, 5], [4, 5]])


def locations_of(placement: ExpertPlacement) -> ExpertLocations:
    """Of TOPK_IDS at the first positions of a sequence."""
    return expert_lookup(placement, CPU).locations(TOPK_IDS, torch.arange(3))


def test_rows_are_ordered_by_destination_then_token() -> None:
    wanted = wanted_rows(locations_of(ExpertPlacement.contiguous(6, 3)).ranks, 3)
    rows = sent_rows(wanted, int(wanted.sum()))
    assert wanted.sum(dim=1).tolist() == [2, 0, 2]
    assert rows.destinations.tolist() == [0, 0, 2, 2]
    assert rows.token_indices.tolist() == [0, 1, 1, 2]


def test_a_row_names_only_the_experts_of_its_destination() -> None:
    locations = locations_of(ExpertPlacement.contiguous(6, 3))
    rows = sent_rows(wanted_rows(locations.ranks, 3), 4)
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    ids, sent_weights = local_choices(locations, weights, rows)
    assert ids.tolist() == [[0, 1], [1, -1], [-1, 1], [0, 1]]
    torch.testing.assert_close(
        sent_weights, torch.tensor([[0.1, 0.2], [0.3, 0.0], [0.0, 0.4], [0.5, 0.6]])
    )


def test_a_permuted_placement_is_followed() -> None:
    placement = ExpertPlacement(3, 2, 4, np.array([3, 0, 2, 1], np.int32))
    every_expert = torch.arange(4)[:, None]
    locations = expert_lookup(placement, CPU).locations(every_expert, torch.zeros(4).long())
    assert locations.ranks.flatten().tolist() == [0, 1, 1, 0]
    assert locations.local_ids.flatten().tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("seed", range(40))
def test_the_tensor_lookup_and_the_placement_name_the_same_copies(seed: int) -> None:
    case = random_case(seed)
    positions = np.concatenate([case.positions_of(source) for source in range(case.ep_size)])
    ids = np.concatenate([case.routes_of(source).topk_ids for source in range(case.ep_size)])
    expected = case.placement.physical_ids(ids, positions)
    lookup = expert_lookup(case.placement, CPU)
    for layer in range(ids.shape[1]):
        layer_ids = torch.from_numpy(ids[:, layer].astype(np.int64))
        physical = lookup.physical_ids(layer_ids, torch.from_numpy(positions))
        assert physical.dtype == torch.int64
        np.testing.assert_array_equal(physical.numpy(), expected[:, layer])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 4])
@pytest.mark.parametrize("hidden_size", [3, 8])
def test_packing_keeps_every_bit(dtype: torch.dtype, num_rows: int, hidden_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
    ids = torch.randint(-1, 300, (num_rows, 5), generator=generator)
    weights = torch.rand(num_rows, 5, generator=generator)
    row_format = RowFormat(hidden_size, 5, dtype)
    got_x, got_ids, got_weights = unpack_rows(row_format, pack_rows(row_format, x, ids, weights))
    assert got_x.dtype == dtype
    assert torch.equal(got_x, x)
    assert torch.equal(got_ids, ids)
    assert torch.equal(got_weights, weights)


def test_results_are_summed_in_rank_order() -> None:
    # 1e8 + 1 - 1e8 is 0 in float32 in this order and 1 in the order that takes the large ones first.
    returned = torch.tensor([[1e8], [1.0], [-1e8]])
    rows = SentRows(torch.zeros(3, dtype=torch.int64), torch.arange(3))
    total = sum_over_ranks(returned, rows, RowSplits(send=(1, 1, 1), recv=(0, 0, 0)), 1)
    assert total.tolist() == [[0.0]]
