"""Which devices this host has and what a rank computes in. Detection happens here and nowhere else."""

from dataclasses import dataclass
from typing import Literal

import torch

from cluster.errors import ConfigError
from cluster.model_spec import ComputeDtype, ModelSpec

DeviceKind = Literal["cpu", "cuda"]
DtypeChoice = Literal["auto", "float32", "bfloat16"]

_TORCH_DTYPES: dict[ComputeDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class HostDevices:
    """What the visible part of a host offers. count: GPUs, 0 without one."""

    kind: DeviceKind
    count: int


def detect_devices() -> HostDevices:
    """GPUs where torch sees any, else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return HostDevices("cuda", count) if count else HostDevices("cpu", 0)


def gpu_memory_bytes(devices: HostDevices) -> int | None:
    """Of the smallest visible GPU, None without one. Opens the GPUs in this process."""
    if devices.kind == "cpu":
        return None
    return min(
        int(torch.cuda.get_device_properties(index).total_memory) for index in range(devices.count)
    )


def rank_device(devices: HostDevices, local_rank: int = 0) -> torch.device:
    """The device of the `local_rank`-th rank among those that see the same GPUs.

    Raises ConfigError when there are fewer GPUs than that.
    """
    if devices.kind == "cpu":
        return torch.device("cpu")
    if local_rank >= devices.count:
        raise ConfigError(
            f"rank {local_rank} of this host has no GPU: {devices.count} visible; lower --ep-size"
        )
    return torch.device("cuda", local_rank)


def cpu_device() -> torch.device:
    return torch.device("cpu")


def use_one_compute_thread() -> None:
    """For this process and, where torch counts per thread, for the calling thread: each one that computes calls it."""
    torch.set_num_threads(1)


def torch_version() -> str:
    return str(torch.__version__)


def choose_compute_dtype(
    choice: DtypeChoice, spec: ModelSpec, kind: DeviceKind, *, deterministic: bool
) -> ComputeDtype:
    """What `model.dtype` means here. auto: the checkpoint's on a GPU, float32 on a CPU, whose bfloat16 is emulated.

    Raises ConfigError where deterministic mode is asked for anything but float32 on CPU.
    """
    if deterministic and kind != "cpu":
        raise ConfigError(
            "--deterministic is held on CPU only; this host serves on a GPU, drop the flag or hide "
            "the GPUs (CUDA_VISIBLE_DEVICES=)"
        )
    if deterministic and choice == "bfloat16":
        raise ConfigError("--deterministic computes in float32 only, got model.dtype = bfloat16")
    if choice != "auto":
        return choice
    return "float32" if kind == "cpu" else spec.checkpoint_dtype


def torch_dtype(dtype: ComputeDtype) -> torch.dtype:
    return _TORCH_DTYPES[dtype]
