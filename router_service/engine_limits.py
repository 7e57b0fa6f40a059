"""What an engine knows of its cell: sizes, shapes and deadlines. Fixed for its life."""

from dataclasses import dataclass

from cluster.routes import RouteShape
from cluster.types import DispatchMode, StepId

FIRST_STEP = StepId(0)


@dataclass(frozen=True)
class EngineLimits:
    num_ranks: int
    block_size: int
    num_kv_blocks: int
    """Per rank."""
    vocab_size: int
    route_shape: RouteShape
    dispatch: DispatchMode
    placement_epoch: int
    frame_timeout_seconds: float
    """How long the routes and scores of a committed step may take."""
    route_bytes_per_step: int = 2**20
    """Of the routes that clients are told, all together: copied twice and sent within a millisecond or two."""
    first_step: StepId = FIRST_STEP
    """What ranks send for steps before it was asked by another engine."""
