"""`pointsman check`: does a checkpoint load, and what would each rank hold. Starts nothing."""

from typing import Any

from deploy.cell_plan import CellPlan, StatePlan
from deploy.planning import CellPreview
from deploy.token_bytes import TokenBytes, token_bytes


def describe(preview: CellPreview) -> dict[str, Any]:
    """Plain values for `--json`. Sizes in bytes; `per_token` with KV in the dtype computed in here (as at top level),
    then in the model's."""
    plan, spec = preview.plan, preview.plan.spec
    here = token_bytes(spec, plan.dtype)
    return {
        "model_dir": str(plan.model_dir),
        "architecture": spec.architecture,
        "layers": spec.num_layers,
        "moe_layers": spec.num_moe_layers,
        "experts": spec.gate.num_experts,
        "experts_per_token": spec.gate.num_experts_per_tok,
        "tensors": len(preview.model.tensors),
        "tensors_checked": preview.model.has_weights,
        "tokenizer_checked": preview.model.has_tokenizer,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "dtype": plan.dtype,
        "ep_size": plan.ep_size,
        "weight_bytes_per_rank": plan.weight_bytes_per_rank,
        "expert_bytes_per_rank": plan.expert_bytes_per_rank,
        "experts_per_rank": spec.gate.num_experts // plan.ep_size,
        "dispatch": plan.dispatch,
        "plans": plan.plans,
        "exchange": plan.exchange,
        "max_model_len": plan.max_model_len,
        "kv_blocks_per_rank": plan.num_kv_blocks,
        "kv_tokens_per_rank": plan.num_kv_tokens,
        "kv_bytes_per_rank": plan.kv_bytes_per_rank,
        "kv_bytes_per_token": here.kv,
        "route_bytes_per_token": here.routes,
        "route_to_kv_ratio": round(here.share_of_kv(here.routes), 6),
        "score_bytes_per_token": here.scores,
        "score_to_kv_ratio": round(here.share_of_kv(here.scores), 6),
        "plan_budget_bytes_per_rank": plan.plan_budget_bytes,
        "route_budget_bytes": plan.route_budget_bytes,
        "score_budget_bytes": plan.score_budget_bytes,
        "state_full_bytes": None if plan.state is None else plan.state.full_bytes,
        "state_max_bytes": None if plan.state is None else plan.state.max_bytes,
        "per_token": [_token_values(row) for row in _token_rows(plan)],
        "does_not_fit": list(preview.shortfalls),
    }


def _token_values(row: TokenBytes) -> dict[str, Any]:
    return {
        "dtype": row.dtype,
        "kv_bytes": row.kv,
        "route_bytes": row.routes,
        "route_to_kv_ratio": round(row.share_of_kv(row.routes), 6),
        "applied_route_weight_dtype": row.applied_dtype,
        "applied_route_bytes": row.applied_routes,
        "applied_route_to_kv_ratio": round(row.share_of_kv(row.applied_routes), 6),
        "score_bytes": row.scores,
        "score_to_kv_ratio": round(row.share_of_kv(row.scores), 6),
    }


def _token_rows(plan: CellPlan) -> list[TokenBytes]:
    """One row where both dtypes are the same."""
    dtypes = dict.fromkeys((plan.dtype, plan.spec.checkpoint_dtype))
    return [token_bytes(plan.spec, dtype) for dtype in dtypes]


def table(preview: CellPreview) -> str:
    """For people: the model, each rank, the engine, a token, and what does not fit."""
    rows = [*_model_lines(preview), *_cell_lines(preview.plan)]
    for row in _token_rows(preview.plan):
        rows += _token_lines(row)
    width = max(len(label) for label, _ in rows)
    lines = [f"{label.ljust(width)}  {text}".rstrip() for label, text in rows]
    return "\n".join(lines + [f"does not fit: {line}" for line in preview.shortfalls])


def _model_lines(preview: CellPreview) -> list[tuple[str, str]]:
    spec = preview.plan.spec
    return [
        ("model", str(preview.plan.model_dir)),
        ("architecture", spec.architecture),
        ("layers", f"{spec.num_layers}, {spec.num_moe_layers} of them with experts"),
        ("experts", f"{spec.gate.num_experts}, {spec.gate.num_experts_per_tok} per token"),
        ("checkpoint", _checkpoint_text(preview)),
    ]


def _checkpoint_text(preview: CellPreview) -> str:
    model, size = preview.model, _size(preview.plan.checkpoint_bytes)
    num_tensors = len(model.tensors)
    if model.has_weights:
        return f"loads: all {num_tensors} tensors are there, shapes and dtypes fit, {size}"
    unchecked = "tensors" if model.has_tokenizer else "tensors and tokenizer"
    return (
        f"config.json alone: {unchecked} not checked; {num_tensors} tensors would be {size} in "
        f"{model.spec.checkpoint_dtype}"
    )


def _cell_lines(plan: CellPlan) -> list[tuple[str, str]]:
    experts = plan.spec.gate.num_experts // plan.ep_size
    replicated = plan.weight_bytes_per_rank - plan.expert_bytes_per_rank
    kv_pool = f"{plan.num_kv_tokens} tokens in {plan.num_kv_blocks} blocks"
    return [
        ("ranks", f"{plan.ep_size}, exchange {plan.exchange}"),
        ("dispatch", f"{plan.dispatch}, {'replays by plans' if plan.plans else 'no plans'}"),
        ("computed in", plan.dtype),
        ("context", f"{plan.max_model_len} tokens"),
        ("each rank", ""),
        ("  weights", _size(plan.weight_bytes_per_rank)),
        ("    experts", f"{_size(plan.expert_bytes_per_rank)}, {experts} in each MoE layer"),
        ("    replicated", _size(replicated)),
        ("  KV pool", f"{_size(plan.kv_bytes_per_rank)}, {kv_pool}"),
        ("  dispatch plans", f"at most {_size(plan.plan_budget_bytes)}"),
        ("engine", ""),
        ("  routes", f"at most {_size(plan.route_budget_bytes)}"),
        ("  scores", f"at most {_size(plan.score_budget_bytes)}"),
        *_state_lines(plan.state),
    ]


def _state_lines(state: StatePlan | None) -> list[tuple[str, str]]:
    if state is None:
        return []
    sizes = f"at most {_size(state.max_bytes)}, {_size(state.full_bytes)} when routes and scores are full"
    return [("  state on disk", f"{state.directory}: {sizes}")]


def _token_lines(row: TokenBytes) -> list[tuple[str, str]]:
    stored = [("  routes", f"{_of_kv(row, row.routes)}, weights float32 as stored")]
    if row.applied_dtype != "float32":
        text = (
            f"{_of_kv(row, row.applied_routes)}, weights {row.applied_dtype} as the model applies"
        )
        stored.append(("", f"{text} them"))
    return [
        (f"per token, KV {row.dtype}", f"{row.kv} bytes"),
        *stored,
        ("  scores", _of_kv(row, row.scores)),
    ]


def _of_kv(row: TokenBytes, num_bytes: int) -> str:
    return f"{num_bytes} bytes = {100 * row.share_of_kv(num_bytes):.2f} % of KV"


def _size(num_bytes: int) -> str:
    """Exact, and readable from a KiB on."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    exact = f"{num_bytes} bytes"
    return exact if unit == "bytes" else f"{exact} ({size:.1f} {unit})"
