"""Which placement a worker takes."""

from dataclasses import replace

import pytest

from cluster.errors import ConfigError
from expert_workers.worker_builder import expert_placement
from tests.expert_workers.driving import SPEC, make_options
from tests.helpers.placements import redundant_placement

NUM_EXPERTS = SPEC.gate.num_experts


def test_experts_lie_in_equal_runs_unless_told_otherwise() -> None:
    options = make_options(ep_size=4)
    given = redundant_placement(NUM_EXPERTS, 4, seed=1)
    assert expert_placement(options, SPEC).local_experts(3).tolist() == list(range(48, 64))
    assert expert_placement(replace(options, placement=given), SPEC) is given


@pytest.mark.parametrize(("num_experts", "ep_size"), [(NUM_EXPERTS - 1, 4), (NUM_EXPERTS, 2)])
def test_a_placement_of_another_size_is_refused_with_both(num_experts: int, ep_size: int) -> None:
    given = redundant_placement(num_experts, ep_size, seed=1)
    options = replace(make_options(ep_size=4), placement=given)
    reason = f"for {num_experts} experts on {ep_size} ranks, the cell has 64 on 4"
    with pytest.raises(ConfigError, match=reason):
        expert_placement(options, SPEC)
