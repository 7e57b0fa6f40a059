"""Does a planned cell fit the host it would start on. Pure.

What `check` prints is added up: weights, KV pools and all budgets, full. What the processes take beside that is not in
it: interpreter, libraries, activations.
"""

from dataclasses import dataclass

from deploy.cell_plan import CellPlan


@dataclass(frozen=True)
class Host:
    """gpu_memory_bytes: of each GPU, None where nobody asked or there is none."""

    memory_bytes: int
    num_gpus: int
    gpu_memory_bytes: int | None


def shortfalls(plan: CellPlan, host: Host) -> tuple[str, ...]:
    """Of a whole cell. What would start and then fail, or be killed by the kernel: one line each, empty if it fits."""
    lines = _gpu_shortfalls(plan, host) if plan.uses_gpus else []
    share = memory_shortfalls(plan, host.memory_bytes, num_ranks=plan.ep_size, has_engine=True)
    return (*lines, *share)


def memory_shortfalls(
    plan: CellPlan, memory_bytes: int, *, num_ranks: int, has_engine: bool
) -> tuple[str, ...]:
    """Of a host that takes so many ranks of the cell, and its engine or not. Ranks on GPUs hold nothing in the host's
    memory."""
    num_ranks = 0 if plan.uses_gpus else num_ranks
    engine_bytes = _engine_bytes(plan) if has_engine else 0
    if num_ranks * _rank_bytes(plan) + engine_bytes <= memory_bytes:
        return ()
    parts = [_ranks_that_take(plan, num_ranks)] if num_ranks else []
    parts += [f"an engine that takes {_engine_shares(plan)}"] if has_engine else []
    exceed = "exceeds" if len(parts) == 1 and num_ranks <= 1 else "exceed"
    remedy = _remedy(plan, num_ranks, memory_bytes, with_engine=has_engine)
    return (f"{' and '.join(parts)} {exceed} this host's memory ({memory_bytes} bytes): {remedy}",)


def _gpu_shortfalls(plan: CellPlan, host: Host) -> list[str]:
    lines = []
    if plan.ep_size > host.num_gpus:
        lines.append(
            f"--ep-size {plan.ep_size} needs as many GPUs, this host has {host.num_gpus}; "
            "CUDA_VISIBLE_DEVICES= (empty) serves on the CPU"
        )
    if host.gpu_memory_bytes is not None and _rank_bytes(plan) > host.gpu_memory_bytes:
        lines.append(
            f"a rank takes {_rank_shares(plan)}, which exceeds a GPU's memory ({host.gpu_memory_bytes} "
            f"bytes): {_remedy(plan, 1, host.gpu_memory_bytes, with_engine=False)}"
        )
    return lines


def _ranks_that_take(plan: CellPlan, num_ranks: int) -> str:
    if num_ranks == 1:
        return f"a rank that takes {_rank_shares(plan)}"
    return f"{num_ranks} ranks that take {_rank_shares(plan)} each"


def _rank_bytes(plan: CellPlan) -> int:
    return plan.weight_bytes_per_rank + plan.kv_bytes_per_rank + plan.plan_budget_bytes


def _engine_bytes(plan: CellPlan) -> int:
    return plan.route_budget_bytes + plan.score_budget_bytes


def _rank_shares(plan: CellPlan) -> str:
    return (
        f"{_rank_bytes(plan)} bytes (weights {plan.weight_bytes_per_rank}, "
        f"KV pool {plan.kv_bytes_per_rank}, dispatch plans {plan.plan_budget_bytes})"
    )


def _engine_shares(plan: CellPlan) -> str:
    return (
        f"{_engine_bytes(plan)} bytes (routes {plan.route_budget_bytes}, "
        f"scores {plan.score_budget_bytes})"
    )


def _remedy(plan: CellPlan, num_ranks: int, memory_bytes: int, *, with_engine: bool) -> str:
    """What takes most of what can be lowered; routes cannot be fewer than those of the KV pools."""
    weight_bytes = num_ranks * plan.weight_bytes_per_rank
    if weight_bytes > memory_bytes:
        halved = plan.dtype == "float32" and not plan.deterministic
        return f"the weights alone need {weight_bytes}" + (
            "; --dtype bfloat16 takes half" if halved else "; take a larger host"
        )
    shares = {
        "--kv-memory or --num-kv-blocks": num_ranks * plan.kv_bytes_per_rank,
        "store.plan_memory": num_ranks * plan.plan_budget_bytes,
    }
    if with_engine:
        shares |= {
            "--route-memory": plan.route_budget_bytes,
            "--score-memory": plan.score_budget_bytes,
        }
    return f"lower {max(shares, key=lambda name: shares[name])}"
