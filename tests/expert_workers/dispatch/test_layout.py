"""The pure part of a dispatch: who gets which rows and how a row is packed."""

import numpy as np
import pytest
import torch

from cluster.placement import ExpertPlacement
from expert_workers.dispatch.layout import (
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

CPU = torch.device("cpu")
TOPK_IDS = torch.tensor([[0, 1], [1, 5], [4, 5]])


def test_rows_are_ordered_by_destination_then_token() -> None:
    lookup = expert_lookup(ExpertPlacement.contiguous(6, 3), CPU)
    wanted = wanted_rows(TOPK_IDS, lookup, 3)
    rows = sent_rows(wanted, int(wanted.sum()))
    assert wanted.sum(dim=1).tolist() == [2, 0, 2]
    assert rows.destinations.tolist() == [0, 0, 2, 2]
    assert rows.token_indices.tolist() == [0, 1, 1, 2]


def test_a_row_names_only_the_experts_of_its_destination() -> None:
    lookup = expert_lookup(ExpertPlacement.contiguous(6, 3), CPU)
    rows = sent_rows(wanted_rows(TOPK_IDS, lookup, 3), 4)
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    ids, sent_weights = local_choices(TOPK_IDS, weights, rows, lookup)
    assert ids.tolist() == [[0, 1], [1, -1], [-1, 1], [0, 1]]
    torch.testing.assert_close(
        sent_weights, torch.tensor([[0.1, 0.2], [0.3, 0.0], [0.0, 0.4], [0.5, 0.6]])
    )


def test_a_permuted_placement_is_followed() -> None:
    placement = ExpertPlacement(3, 2, 4, np.array([3, 0, 2, 1], np.int32))
    lookup = expert_lookup(placement, CPU)
    assert lookup.ranks.tolist() == [0, 1, 1, 0]
    assert lookup.local_ids.tolist() == [1, 1, 0, 0]


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
