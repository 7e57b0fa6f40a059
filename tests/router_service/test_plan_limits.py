"""What the configuration allows a plan book."""

import pytest

from cluster.config import Config, SchedulerSection
from cluster.worker_messages import CellIdentity
from router_service.plan_limits import plan_limits
from tests.helpers.plan_desk import NUM_RANKS


def make_identity(block_size: int) -> CellIdentity:
    return CellIdentity(
        model_fingerprint="digests",
        dtype="float32",
        deterministic=True,
        ep_size=NUM_RANKS,
        placement_epoch=0,
        dispatch="negotiated",
        block_size=block_size,
        num_kv_blocks=64,
    )


@pytest.mark.parametrize(
    ("budget", "fragment_tokens"),
    [(2048, 128), (512, 128), (256, 128), (255, 112), (128, 64), (40, 16), (16, 16), (15, 0)],
)
def test_two_fragments_fit_a_step_budget_and_at_least_one(
    budget: int, fragment_tokens: int
) -> None:
    config = Config(scheduler=SchedulerSection(max_num_batched_tokens=budget))
    assert plan_limits(config, make_identity(block_size=16)).fragment_tokens == fragment_tokens


@pytest.mark.parametrize(("budget", "ahead_tokens"), [(2048, 8192), (15, 60)])
def test_two_blocks_are_worth_a_plan_and_four_steps_are_asked_for_ahead(
    budget: int, ahead_tokens: int
) -> None:
    config = Config(scheduler=SchedulerSection(max_num_batched_tokens=budget))
    limits = plan_limits(config, make_identity(block_size=16))
    assert (limits.min_run_tokens, limits.ahead_tokens) == (32, ahead_tokens)
