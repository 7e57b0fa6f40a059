"""Does a planned cell fit the host it would start on. Pure."""

from dataclasses import dataclass

from deploy.cell_plan import CellPlan


@dataclass(frozen=True)
class Host:
    """gpu_memory_bytes: of each GPU, None where nobody asked or there is none."""

    memory_bytes: int
    num_gpus: int
    gpu_memory_bytes: int | None


def shortfalls(plan: CellPlan, host: Host) -> tuple[str, ...]:
    """What would start and then fail, or be killed by the kernel: one line each, empty if it fits."""
    return _gpu_shortfalls(plan, host) if plan.uses_gpus else _memory_shortfalls(plan, host)


def _gpu_shortfalls(plan: CellPlan, host: Host) -> tuple[str, ...]:
    lines = []
    if plan.ep_size > host.num_gpus:
        lines.append(
            f"--ep-size {plan.ep_size} needs as many GPUs, this host has {host.num_gpus}; "
            "CUDA_VISIBLE_DEVICES= (empty) serves on the CPU"
        )
    if host.gpu_memory_bytes is not None and _rank_bytes(plan) > host.gpu_memory_bytes:
        lines.append(
            f"a rank takes {_shares(plan)}, which exceeds a GPU's memory ({host.gpu_memory_bytes} "
            f"bytes): {_remedy(plan, num_ranks=1, memory_bytes=host.gpu_memory_bytes)}"
        )
    return tuple(lines)


def _memory_shortfalls(plan: CellPlan, host: Host) -> tuple[str, ...]:
    if plan.ep_size * _rank_bytes(plan) <= host.memory_bytes:
        return ()
    return (
        f"{plan.ep_size} ranks that take {_shares(plan)} each exceed this host's memory "
        f"({host.memory_bytes} bytes): {_remedy(plan, num_ranks=plan.ep_size, memory_bytes=host.memory_bytes)}",
    )


def _rank_bytes(plan: CellPlan) -> int:
    return plan.weight_bytes_per_rank + plan.kv_bytes_per_rank


def _shares(plan: CellPlan) -> str:
    return (
        f"{_rank_bytes(plan)} bytes (weights {plan.weight_bytes_per_rank}, "
        f"KV pool {plan.kv_bytes_per_rank})"
    )


def _remedy(plan: CellPlan, *, num_ranks: int, memory_bytes: int) -> str:
    weight_bytes = num_ranks * plan.weight_bytes_per_rank
    if weight_bytes <= memory_bytes:
        return "lower --kv-memory or --num-kv-blocks"
    halved = plan.dtype == "float32" and not plan.deterministic
    return f"the weights alone need {weight_bytes}" + (
        "; --dtype bfloat16 takes half" if halved else "; take a larger host"
    )
