"""What a cell will be: every value that one of its processes needs, settled before any is started. No torch here."""

from dataclasses import dataclass
from pathlib import Path

from cluster.model_spec import ComputeDtype, ModelSpec
from cluster.types import DispatchMode, ExchangeKind
from cluster.worker_messages import CellIdentity


@dataclass(frozen=True)
class StatePlan:
    """Where and how routes and scores are kept over restarts."""

    directory: Path
    max_bytes: int
    full_bytes: int
    """What routes and scores take on disk once when their budgets are full."""
    fsync_seconds: float


@dataclass(frozen=True)
class CellPlan:
    """Every value that a process of the cell needs, settled and checked."""

    model_dir: Path
    served_model_name: str
    created: int
    """Unix seconds: when the newest file of the checkpoint was written."""
    spec: ModelSpec
    dtype: ComputeDtype
    ep_size: int
    dispatch: DispatchMode
    """Of tokens without a plan."""
    plans: bool
    """Replays travel by plans, until somebody switches that off."""
    exchange: ExchangeKind
    uses_gpus: bool
    deterministic: bool
    block_size: int
    num_kv_blocks: int
    max_model_len: int
    route_budget_bytes: int
    score_budget_bytes: int
    plan_budget_bytes: int
    """Compiled plan fragments that a rank keeps, at most."""
    state: StatePlan | None
    """None: they end with the engine."""
    checkpoint_bytes: int
    weight_bytes_per_rank: int
    """Replicated weights and the rank's experts, as they are held (every rank has as many experts)."""
    expert_bytes_per_rank: int
    """Of these, the experts."""
    exchange_timeout_seconds: float
    warnings: tuple[str, ...]
    """One line each: what the checkpoint asks for and does not get."""

    def identity(self, model_fingerprint: str) -> CellIdentity:
        """What engine and ranks compare before the first step."""
        return CellIdentity(
            model_fingerprint=model_fingerprint,
            dtype=self.dtype,
            deterministic=self.deterministic,
            ep_size=self.ep_size,
            placement_epoch=0,
            dispatch=self.dispatch,
            block_size=self.block_size,
            num_kv_blocks=self.num_kv_blocks,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        return self.spec.kv_bytes_per_token(self.dtype)

    @property
    def kv_bytes_per_block(self) -> int:
        return self.block_size * self.kv_bytes_per_token

    @property
    def kv_bytes_per_rank(self) -> int:
        return self.num_kv_blocks * self.kv_bytes_per_block

    @property
    def num_kv_tokens(self) -> int:
        """Per rank."""
        return self.num_kv_blocks * self.block_size
