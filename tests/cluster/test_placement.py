import numpy as np
import pytest

from cluster.errors import ConfigError
from cluster.placement import ExpertPlacement


def test_contiguous_placement_deals_every_expert_to_one_rank() -> None:
    placement = ExpertPlacement.contiguous(12, 3)
    owned = [placement.local_experts(rank).tolist() for rank in range(3)]
    assert owned == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_an_ep_size_that_does_not_divide_the_experts_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        ConfigError, match=r"--ep-size 5 .* 12 routed experts; possible: 1, 2, 3, 4, 6, 12"
    ):
        ExpertPlacement.contiguous(12, 5)


@pytest.mark.parametrize("seed", range(20))
def test_every_logical_expert_maps_to_a_physical_copy_of_itself(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_experts, ep_size = int(rng.integers(2, 20)), int(rng.integers(1, 5))
    extra = rng.integers(0, num_experts, size=(-num_experts) % ep_size + ep_size)
    copies = rng.permutation(np.concatenate([np.arange(num_experts), extra])).astype(np.int32)
    placement = ExpertPlacement(3, ep_size, num_experts, copies)
    first = placement.logical_to_physical_map
    assert np.array_equal(copies[first], np.arange(num_experts))
    dealt = np.concatenate([placement.local_experts(rank) for rank in range(ep_size)])
    assert np.array_equal(dealt, copies)


@pytest.mark.parametrize("copies", [[0, 1, 1], [0, 1, 3], [0, 2, 1, -1]])
def test_a_placement_that_misses_or_invents_an_expert_is_refused(copies: list[int]) -> None:
    with pytest.raises(ConfigError, match="each of 3 logical experts"):
        ExpertPlacement(0, 1, 3, np.array(copies, np.int32))
