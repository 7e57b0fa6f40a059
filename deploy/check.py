"""`pointsman check`: does a checkpoint load, and what would each rank hold. Starts nothing."""

from typing import Any

from cluster.scores import SCORE_BYTES
from deploy.cell_plan import CellPlan


def describe(plan: CellPlan) -> dict[str, Any]:
    """Plain values for `--json` and the table."""
    spec = plan.spec
    kv, routes = plan.kv_bytes_per_token, spec.route_shape.bytes_per_token
    return {
        "model_dir": str(plan.model_dir),
        "architecture": spec.architecture,
        "layers": spec.num_layers,
        "moe_layers": spec.num_moe_layers,
        "experts": spec.gate.num_experts,
        "experts_per_token": spec.gate.num_experts_per_tok,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "dtype": plan.dtype,
        "ep_size": plan.ep_size,
        "weight_bytes_per_rank": plan.weight_bytes_per_rank,
        "expert_bytes_per_rank": plan.expert_bytes_per_rank,
        "experts_per_rank": spec.gate.num_experts // plan.ep_size,
        "dispatch": plan.dispatch,
        "exchange": plan.exchange,
        "max_model_len": plan.max_model_len,
        "kv_tokens_per_rank": plan.num_kv_tokens,
        "kv_bytes_per_rank": plan.num_kv_tokens * kv,
        "kv_bytes_per_token": kv,
        "route_bytes_per_token": routes,
        "route_to_kv_ratio": round(routes / kv, 4),
        "route_budget_bytes": plan.route_budget_bytes,
        "score_bytes_per_token": SCORE_BYTES,
        "score_budget_bytes": plan.score_budget_bytes,
    }


def table(description: dict[str, Any]) -> str:
    width = max(map(len, description))
    return "\n".join(f"{key.ljust(width)}  {value}" for key, value in description.items())
