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


def random_placement(rng: np.random.Generator) -> ExpertPlacement:
    """Always with further copies of some experts."""
    num_experts, ep_size = int(rng.integers(2, 300)), int(rng.integers(1, 5))
    extra = rng.integers(0, num_experts, size=(-num_experts) % ep_size + ep_size)
    copies = rng.permutation(np.concatenate([np.arange(num_experts), extra])).astype(np.int32)
    return ExpertPlacement(3, ep_size, num_experts, copies)


@pytest.mark.parametrize("seed", range(20))
def test_every_physical_expert_is_a_copy_of_its_logical_one_and_sits_on_one_rank(
    seed: int,
) -> None:
    placement = random_placement(np.random.default_rng(seed))
    physical = placement.physical_to_logical_map
    dealt = [placement.local_experts(rank) for rank in range(placement.ep_size)]
    assert np.array_equal(np.concatenate(dealt), physical)
    for expert, copies in enumerate(placement.logical_to_physical_map):
        count = placement.replica_counts[expert]
        assert copies[:count].tolist() == np.flatnonzero(physical == expert).tolist()
        assert (copies[count:] == -1).all()


@pytest.mark.parametrize("seed", range(20))
def test_the_copy_that_serves_depends_on_expert_and_position_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = random_placement(rng)
    ids = rng.integers(0, placement.num_experts, (30, 2, 4)).astype(np.uint16)
    positions = rng.integers(0, 10_000, 30)
    served = placement.physical_ids(ids, positions)
    assert served.dtype == np.int64
    assert np.array_equal(placement.physical_to_logical_map[served], ids)
    order = rng.permutation(30)
    assert np.array_equal(placement.physical_ids(ids[order], positions[order]), served[order])
    later = positions + 3 * placement.position_period
    assert np.array_equal(placement.physical_ids(ids, later), served)


def test_every_copy_of_an_expert_serves_equally_many_positions_of_a_period() -> None:
    placement = ExpertPlacement(1, 2, 3, np.array([2, 0, 2, 1, 1, 2], np.int32))
    assert placement.position_period == 6
    positions = np.arange(4, 4 + placement.position_period)
    for expert, expected in ((0, [1] * 6), (1, [3, 4] * 3), (2, [0, 2, 5] * 2)):
        served = placement.physical_ids(np.full((6, 1), expert, np.uint8), positions)
        assert sorted(served[:, 0].tolist()) == sorted(expected)


def test_without_redundant_copies_positions_do_not_matter() -> None:
    placement = ExpertPlacement(1, 2, 4, np.array([3, 0, 2, 1], np.int32))
    ids = np.tile(np.arange(4, dtype=np.uint8), (5, 1))
    assert placement.position_period == 1
    assert placement.physical_ids(ids, np.arange(5)).tolist() == [[1, 3, 2, 0]] * 5


@pytest.mark.parametrize("copies", [[0, 1, 1], [0, 1, 3], [0, 2, 1, -1]])
def test_a_placement_that_misses_or_invents_an_expert_is_refused(copies: list[int]) -> None:
    with pytest.raises(ConfigError, match="each of 3 logical experts"):
        ExpertPlacement(0, 1, 3, np.array(copies, np.int32))


@pytest.mark.parametrize("ep_size", [0, -1, -2])
def test_a_placement_on_no_rank_is_refused(ep_size: int) -> None:
    with pytest.raises(ConfigError, match=f"ep_size {ep_size} .* at least 1"):
        ExpertPlacement(0, ep_size, 4, np.arange(4, dtype=np.int32))
