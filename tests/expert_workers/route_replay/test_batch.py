"""Where sequences lie in a batch, and which of its tokens have routes."""

import numpy as np
import pytest
import torch

from cluster.errors import RouteReplayError
from expert_workers.route_replay.batch import BatchLayout, place
from expert_workers.route_replay.ranged_routes import RangedRoutes


def make_routes(
    num_tokens: int, start: int = 0, *, num_layers: int = 2, weights: bool = True
) -> RangedRoutes:
    """Token t at position p has the experts p and p + 1 in every layer."""
    positions = np.arange(start, start + num_tokens)[:, None, None]
    ids = np.broadcast_to(positions + np.arange(2), (num_tokens, num_layers, 2))
    return RangedRoutes(ids, np.ones(ids.shape, np.float32) if weights else None, start)


def test_sequences_are_found_beside_padding_on_either_side() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    layout = BatchLayout.padded(mask)
    assert layout == BatchLayout(16, (range(0, 3), range(6, 8), range(8, 8), range(12, 16)))
    assert BatchLayout.padded(mask.bool()) == layout


def test_packed_sequences_lie_one_after_the_other() -> None:
    assert BatchLayout.packed([3, 0, 2]).sequences == (range(3), range(3, 3), range(3, 5))
    assert BatchLayout.packed([3, 2], num_tokens=8).num_tokens == 8


def test_routes_go_to_the_positions_of_their_sequence() -> None:
    layout = BatchLayout.padded(torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]))
    batch = place(layout, [make_routes(2, 1), None, make_routes(1, 0)])
    assert batch.places.tolist() == [2, 3, 8]
    assert batch.topk_ids[:, 0, 0].tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(4), "attention_mask of shape [4]"),
        (torch.tensor([[1, 1, 1], [1, 0, 1]]), "row 1 has padding between tokens"),
    ],
)
def test_a_mask_that_is_no_layout_is_refused(mask: torch.Tensor, message: str) -> None:
    with pytest.raises(RouteReplayError) as refused:
        BatchLayout.padded(mask)
    assert message in str(refused.value)


@pytest.mark.parametrize("lengths", [[3, 3], [6], [5, -1]])
def test_packed_sequences_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    with pytest.raises(RouteReplayError, match="do not fit a row of 5"):
        BatchLayout.packed(lengths, num_tokens=5)


@pytest.mark.parametrize(
    "sequences", [(range(3), range(2, 4)), (range(2, 4), range(2)), (range(9),), (range(0, 4, 2),)]
)
def test_sequences_that_overlap_or_leave_the_batch_are_refused(
    sequences: tuple[range, ...],
) -> None:
    with pytest.raises(RouteReplayError, match="side by side or apart"):
        BatchLayout(8, sequences)


LAYOUT = BatchLayout.packed([3, 4])


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([make_routes(3)], "routes of 1 sequences for a batch of 2"),
        ([make_routes(3), make_routes(2, 3)], "sequence 1: routes of positions [3, 5)"),
        ([None, None], "no token of the batch has routes"),
        ([make_routes(0), None], "no token of the batch has routes"),
        ([make_routes(3), make_routes(3, num_layers=1)], "[(1, 2), (2, 2)]"),
        ([make_routes(3), make_routes(3, weights=False)], "weights for 1 of 2 sequences"),
    ],
)
def test_routes_that_do_not_fit_a_batch_are_refused(
    routes: list[RangedRoutes | None], message: str
) -> None:
    with pytest.raises(RouteReplayError) as refused:
        place(LAYOUT, routes)
    assert message in str(refused.value)
