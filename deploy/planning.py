"""From settings and a checkpoint to a CellPlan. Reads headers, no weights; starts nothing."""

from pathlib import Path

import psutil

from cluster.config import Config, parse_size
from cluster.errors import ConfigError
from cluster.model_config.read import read_model_spec
from cluster.model_spec import ComputeDtype, ModelSpec
from cluster.placement import ExpertPlacement
from cluster.types import DispatchMode, ExchangeKind, Rank
from deploy.api_key import read_api_key
from deploy.cell_plan import CellPlan
from expert_workers.device import HostDevices, choose_compute_dtype, detect_devices
from expert_workers.model.checkpoint import check_checkpoint
from expert_workers.model.weights import weight_share
from router_service.model_text import load_model_text

DEMO_MODEL = Path(__file__).parent / "demo_model"
DEFAULT_CPU_RANKS = 4


def plan_cell(config: Config) -> CellPlan:
    """Raises ConfigError (CheckpointError for the model): file or flag, value, what is supported."""
    model_dir = Path(config.model.dir) if config.model.dir else DEMO_MODEL
    spec = read_model_spec(model_dir)
    tensors = check_checkpoint(model_dir, spec)
    text = load_model_text(model_dir, spec.vocab_size)
    read_api_key(config.http.api_key_file)
    devices = detect_devices()
    ep_size = config.cell.ep_size or devices.count or DEFAULT_CPU_RANKS
    placement = ExpertPlacement.contiguous(spec.gate.num_experts, ep_size)
    uses_gpus = _uses_gpus(devices, ep_size)
    dtype = choose_compute_dtype(
        config.model.dtype, spec, devices.kind, deterministic=config.cell.deterministic
    )
    share = weight_share(tensors, placement.local_experts(Rank(0)), dtype)
    num_kv_blocks = _num_kv_blocks(config, spec, dtype)
    if not uses_gpus:
        kv_bytes = num_kv_blocks * config.store.block_size * spec.kv_bytes_per_token(dtype)
        _check_host_memory(kv_bytes, ep_size)
    return CellPlan(
        model_dir=model_dir.resolve(),
        served_model_name=config.model.served_name or _default_name(model_dir),
        spec=spec,
        dtype=dtype,
        ep_size=ep_size,
        dispatch=_dispatch(config, ep_size),
        exchange=_exchange(config, uses_gpus),
        uses_gpus=uses_gpus,
        deterministic=config.cell.deterministic,
        block_size=config.store.block_size,
        num_kv_blocks=num_kv_blocks,
        max_model_len=_max_model_len(config, spec, num_kv_blocks),
        route_budget_bytes=_route_budget(config, spec, ep_size * num_kv_blocks),
        score_budget_bytes=parse_size(config.store.score_memory),
        exchange_timeout_seconds=config.cell.exchange_timeout_seconds,
        warnings=tuple(
            filter(None, (text.defaults.warning, _cut_context(config, spec, num_kv_blocks)))
        ),
        checkpoint_bytes=sum(entry.num_bytes for entry in tensors.values()),
        weight_bytes_per_rank=share.replicated_bytes + share.expert_bytes,
        expert_bytes_per_rank=share.expert_bytes,
    )


def _default_name(model_dir: Path) -> str:
    return "minnow" if model_dir == DEMO_MODEL else model_dir.resolve().name


def _uses_gpus(devices: HostDevices, ep_size: int) -> bool:
    """A cell is all GPU or all CPU."""
    if devices.kind == "cuda" and ep_size > devices.count:
        raise ConfigError(
            f"--ep-size {ep_size} needs as many GPUs, this host has {devices.count}; "
            "CUDA_VISIBLE_DEVICES= (empty) serves on the CPU"
        )
    return devices.kind == "cuda"


def _dispatch(config: Config, ep_size: int) -> DispatchMode:
    """One rank has nobody to talk to, unless negotiated dispatch is asked for by name."""
    return "local" if ep_size == 1 and config.cell.dispatch != "negotiated" else "negotiated"


def _exchange(config: Config, uses_gpus: bool) -> ExchangeKind:
    exchange = config.cell.exchange
    if exchange == "auto":
        return "nccl" if uses_gpus else "gloo"
    if exchange == "nccl" and not uses_gpus:
        raise ConfigError("--exchange nccl needs one GPU per rank; on CPU use --exchange gloo")
    if exchange == "gloo" and uses_gpus:
        raise ConfigError("--exchange gloo moves rows between CPU ranks; on GPUs use nccl")
    return exchange


def _num_kv_blocks(config: Config, spec: ModelSpec, dtype: ComputeDtype) -> int:
    if config.store.num_kv_blocks:
        return config.store.num_kv_blocks
    block_bytes = config.store.block_size * spec.kv_bytes_per_token(dtype)
    num_blocks = parse_size(config.store.kv_memory) // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"--kv-memory {config.store.kv_memory} holds no block: one takes {block_bytes} bytes"
        )
    return num_blocks


def _check_host_memory(kv_bytes: int, ep_size: int) -> None:
    """Refuses now what would start and then be killed by the kernel."""
    total = psutil.virtual_memory().total
    if ep_size * kv_bytes > total:
        raise ConfigError(
            f"{ep_size} ranks with KV pools of {kv_bytes} bytes each exceed this host's memory "
            f"({total} bytes): lower --kv-memory or --num-kv-blocks"
        )


def _max_model_len(config: Config, spec: ModelSpec, num_kv_blocks: int) -> int:
    """The context, which one rank's KV pool must be able to hold."""
    capacity = num_kv_blocks * config.store.block_size
    asked = config.model.max_len
    if asked > spec.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {asked} exceeds the model's {spec.max_position_embeddings} positions"
        )
    if asked > capacity:
        raise ConfigError(
            f"--max-model-len {asked} exceeds the {capacity} tokens of a rank's KV pool: "
            "raise --kv-memory or --num-kv-blocks"
        )
    return asked or min(spec.max_position_embeddings, capacity)


def _cut_context(config: Config, spec: ModelSpec, num_kv_blocks: int) -> str | None:
    """A context that the KV pool makes shorter than the model's, unasked."""
    max_len = _max_model_len(config, spec, num_kv_blocks)
    if config.model.max_len or max_len == spec.max_position_embeddings:
        return None
    return (
        f"the context is cut from {spec.max_position_embeddings} to {max_len} tokens, which is what a "
        "rank's KV pool holds: raise --kv-memory or --num-kv-blocks"
    )


def _route_budget(config: Config, spec: ModelSpec, total_blocks: int) -> int:
    """Routes outlive KV, so they must at least fit beside it."""
    budget = parse_size(config.store.route_memory)
    needed = total_blocks * config.store.block_size * spec.route_shape.bytes_per_token
    if budget < needed:
        raise ConfigError(
            f"--route-memory {config.store.route_memory} ({budget} bytes) is less than the routes of "
            f"all KV blocks ({needed} bytes): raise it or lower --kv-memory"
        )
    return budget
