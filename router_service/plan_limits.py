"""From settings to what bounds the plans of a cell. Pure."""

from typing import Literal

from cluster.config import Config, parse_size
from cluster.worker_messages import CellIdentity
from router_service.plan_book import PlanLimits

FRAGMENT_BLOCKS = 8
"""Blocks of a fragment: large enough to be worth a message, small enough to fit a step beside others."""
MIN_RUN_BLOCKS = 2
"""Under it a plan would spare one exchange of counts and cost a compile, a message to every rank and the wait for all
their answers. Such runs are frequent: a prompt of whole blocks whose KV is there replays its last one, each further
choice of a prompt the tokens after its last block."""
AHEAD_STEPS = 4
"""Full steps of a rank for which fragments are asked for ahead: far enough that compiling and sending them is done when
they are due, near enough that an abort, or a full memory, wastes little."""
MAX_PUMP_BYTES = 16 * 2**20
"""To all ranks, between two steps: some ten milliseconds of packing, in which no rank computes."""


def plan_limits(config: Config, identity: CellIdentity) -> PlanLimits:
    """Two fragments fit a rank's token budget, so that one does beside some decodes; with a budget under two blocks it
    is one block, under one block nothing is planned."""
    budget_blocks = config.scheduler.max_num_batched_tokens // identity.block_size
    blocks = min(FRAGMENT_BLOCKS, budget_blocks, max(1, budget_blocks // 2))
    return PlanLimits(
        num_ranks=identity.ep_size,
        placement_epoch=identity.placement_epoch,
        fragment_tokens=blocks * identity.block_size,
        memory_bytes=parse_size(config.store.plan_memory),
        wait_seconds=config.scheduler.plan_wait_seconds,
        min_run_tokens=MIN_RUN_BLOCKS * identity.block_size,
        ahead_tokens=AHEAD_STEPS * config.scheduler.max_num_batched_tokens,
        max_pump_bytes=MAX_PUMP_BYTES,
    )


def plans_by_default(dispatch: Literal["auto", "negotiated", "planned"], ep_size: int) -> bool:
    """auto: where rows cross between ranks."""
    return dispatch == "planned" or (dispatch == "auto" and ep_size > 1)
