"""From settings and a checkpoint to a CellPlan. Reads headers, no weights; starts nothing."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.config import Config, HttpSection, parse_size
from cluster.errors import CheckpointError, ConfigError
from cluster.model_config.read import read_model_spec
from cluster.model_spec import ComputeDtype, ModelSpec
from cluster.placement import ExpertPlacement
from cluster.types import DispatchMode, ExchangeKind, Rank
from deploy.api_keys import read_http_keys
from deploy.cell_plan import CellPlan
from deploy.exposure import check_exposure
from deploy.host_fit import Host, shortfalls
from deploy.private_files import check_private
from deploy.state_plan import plan_state
from expert_workers.device import (
    HostDevices,
    choose_compute_dtype,
    detect_devices,
    gpu_memory_bytes,
)
from expert_workers.model.checkpoint import (
    TensorEntry,
    check_checkpoint,
    described_tensors,
    weight_files,
)
from expert_workers.model.weights import weight_share
from prefix_store.journal.directory import check_state_directory
from router_service.model_text import load_model_text
from router_service.origins import check_origins
from router_service.plan_limits import plans_by_default
from router_service.tls_files import tls_files
from router_service.tracing import trace_environment

DEMO_MODEL = Path(__file__).parent / "demo_model"
DEFAULT_CPU_RANKS = 4


@dataclass(frozen=True)
class FoundModel:
    """A model directory as far as it goes. Without weights, `tensors` are those that its config asks for."""

    model_dir: Path
    spec: ModelSpec
    tensors: dict[str, TensorEntry]
    has_weights: bool
    has_tokenizer: bool
    warning: str | None
    """What its generation config asks for and does not get."""


@dataclass(frozen=True)
class CellPreview:
    """A cell that may not be servable here: what its model directory holds, and what this host lacks."""

    plan: CellPlan
    model: FoundModel
    shortfalls: tuple[str, ...]


def plan_cell(config: Config) -> CellPlan:
    """A cell that can be started here.

    Raises ConfigError (CheckpointError for the model): file or flag, value, what is supported.
    """
    devices = detect_devices()
    plan = plan_cell_on(config, devices)
    host = Host(psutil.virtual_memory().total, devices.count, gpu_memory_bytes=None)
    for shortfall in shortfalls(plan, host):
        raise ConfigError(shortfall)
    return plan


def plan_cell_on(config: Config, devices: HostDevices) -> CellPlan:
    """A cell for these devices, wherever they are; its engine is here. Raises ConfigError as `plan_cell` does."""
    plan = _plan(config, _whole_model(_model_dir(config)), devices)
    if plan.state is not None:
        check_state_directory(plan.state.directory)
    return plan


def model_dir_of(config: Config) -> Path:
    """As it is asked for, be it there or not."""
    return Path(config.model.dir) if config.model.dir else DEMO_MODEL


def preview_cell(config: Config) -> CellPreview:
    """What a cell would be, also of a config.json alone or where this host is too small.

    Raises ConfigError as `plan_cell` does for all else.
    """
    devices = detect_devices()
    model_dir = _model_dir(config)
    model = _whole_model(model_dir) if weight_files(model_dir) else _config_alone(model_dir)
    plan = _plan(config, model, devices)
    host = Host(psutil.virtual_memory().total, devices.count, gpu_memory_bytes(devices))
    return CellPreview(plan, model, shortfalls(plan, host))


def _model_dir(config: Config) -> Path:
    if not config.model.dir:
        return DEMO_MODEL
    if not os.path.isdir(config.model.dir):  # Path.is_dir raises for a name that is too long
        raise CheckpointError(
            f"{config.model.dir}: no such directory; a model is a local directory with a checkpoint (not a file), "
            "none is downloaded"
        )
    return Path(config.model.dir)


def _whole_model(model_dir: Path) -> FoundModel:
    spec = read_model_spec(model_dir)
    tensors = check_checkpoint(model_dir, spec)
    warning = load_model_text(model_dir, spec.vocab_size).defaults.warning
    return FoundModel(
        model_dir, spec, tensors, has_weights=True, has_tokenizer=True, warning=warning
    )


def _config_alone(model_dir: Path) -> FoundModel:
    """Without weights; with or without a tokenizer."""
    spec = read_model_spec(model_dir)
    has_tokenizer = (model_dir / "tokenizer.json").exists()
    warning = (
        load_model_text(model_dir, spec.vocab_size).defaults.warning if has_tokenizer else None
    )
    tensors = described_tensors(model_dir, spec)
    return FoundModel(
        model_dir, spec, tensors, has_weights=False, has_tokenizer=has_tokenizer, warning=warning
    )


def _plan(config: Config, model: FoundModel, devices: HostDevices) -> CellPlan:
    spec, uses_gpus = model.spec, devices.kind == "cuda"
    _check_http(config.http)
    ep_size = config.cell.ep_size or devices.count or DEFAULT_CPU_RANKS
    placement = ExpertPlacement.contiguous(spec.gate.num_experts, ep_size)
    dtype = choose_compute_dtype(
        config.model.dtype, spec, devices.kind, deterministic=config.cell.deterministic
    )
    share = weight_share(model.tensors, placement.local_experts(Rank(0)), dtype)
    num_kv_blocks = _num_kv_blocks(config, spec, dtype)
    route_budget_bytes = _route_budget(config, spec, ep_size * num_kv_blocks)
    return CellPlan(
        model_dir=model.model_dir.resolve(),
        served_model_name=config.model.served_name or _default_name(model.model_dir),
        created=_created(model.model_dir),
        spec=spec,
        dtype=dtype,
        ep_size=ep_size,
        dispatch=_dispatch(config, ep_size),
        plans=plans_by_default(config.cell.dispatch, ep_size),
        exchange=_exchange(config, uses_gpus),
        uses_gpus=uses_gpus,
        deterministic=config.cell.deterministic,
        block_size=config.store.block_size,
        num_kv_blocks=num_kv_blocks,
        max_model_len=_max_model_len(config, spec, num_kv_blocks),
        route_budget_bytes=route_budget_bytes,
        score_budget_bytes=parse_size(config.store.score_memory),
        plan_budget_bytes=parse_size(config.store.plan_memory),
        state=plan_state(config.store, spec.route_shape, route_budget_bytes),
        exchange_timeout_seconds=config.cell.exchange_timeout_seconds,
        warnings=tuple(filter(None, (model.warning, _cut_context(config, spec, num_kv_blocks)))),
        checkpoint_bytes=sum(entry.num_bytes for entry in model.tensors.values()),
        weight_bytes_per_rank=share.replicated_bytes + share.expert_bytes,
        expert_bytes_per_rank=share.expert_bytes,
    )


def _check_http(http: HttpSection) -> None:
    check_exposure(http, read_http_keys(http, os.environ))
    check_origins(http.cors_origins)
    if tls_files(http.tls_cert, http.tls_key) is not None:
        check_private("--tls-key", http.tls_key)
    trace_environment(http.tracing, os.environ)


def _default_name(model_dir: Path) -> str:
    return "minnow" if model_dir == DEMO_MODEL else model_dir.resolve().name


def _created(model_dir: Path) -> int:
    files = [model_dir / "config.json", *weight_files(model_dir)]
    return int(max(file.stat().st_mtime for file in files))


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
            f"--kv-memory {config.store.kv_memory} holds no block: one takes {block_bytes} bytes; "
            "raise it"
        )
    return num_blocks


def _max_model_len(config: Config, spec: ModelSpec, num_kv_blocks: int) -> int:
    """The context, which one rank's KV pool must be able to hold."""
    capacity = num_kv_blocks * config.store.block_size
    asked = config.model.max_len
    if asked > spec.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {asked} exceeds the model's {spec.max_position_embeddings} positions; "
            "lower it"
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
