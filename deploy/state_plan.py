"""From settings to where and how routes and scores are kept on disk. Touches no disk."""

from pathlib import Path

from cluster.config import StoreSection, parse_size
from cluster.errors import ConfigError
from cluster.routes import RouteShape
from deploy.cell_plan import StatePlan
from prefix_store.journal.journal import MIN_FILL
from prefix_store.journal.records import BlockSizes

DEFAULT_FILL = 4
"""Full stores that the files may be as large as: three are there at most, and traffic goes on."""


def plan_state(store: StoreSection, shape: RouteShape, route_budget_bytes: int) -> StatePlan | None:
    """Raises ConfigError for settings of a state that there is none of, and for a size that is too small."""
    if not store.state_dir:
        _refuse_settings_of_none(store)
        return None
    sizes = BlockSizes.of(store.block_size, shape)
    full_bytes = sizes.stored_bytes(
        route_budget_bytes // sizes.routes, parse_size(store.score_memory) // sizes.scores
    )
    max_bytes = parse_size(store.state_size) if store.state_size else DEFAULT_FILL * full_bytes
    if max_bytes < MIN_FILL * full_bytes:
        raise ConfigError(
            f"--state-size {store.state_size} ({max_bytes} bytes) is less than {MIN_FILL} times what full routes and "
            f"scores take on disk ({MIN_FILL * full_bytes} bytes): raise it or lower --route-memory and --score-memory"
        )
    return StatePlan(Path(store.state_dir).absolute(), max_bytes, full_bytes, store.fsync_seconds)


def _refuse_settings_of_none(store: StoreSection) -> None:
    if store.state_size:
        raise ConfigError(f"--state-size {store.state_size}: nothing is kept without --state-dir")
    if store.fsync_seconds != StoreSection().fsync_seconds:
        raise ConfigError(
            f"--fsync-seconds {store.fsync_seconds:g}: nothing is kept without --state-dir"
        )
