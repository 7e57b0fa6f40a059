import pytest
import torch

from cluster.errors import ConfigError
from cluster.model_config.read import read_model_spec
from cluster.model_spec import ComputeDtype
from expert_workers.device import (
    DeviceKind,
    DtypeChoice,
    HostDevices,
    choose_compute_dtype,
    detect_devices,
    rank_device,
    torch_dtype,
)
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

SPEC = read_model_spec(DEMO_MODEL_DIR)


@pytest.mark.parametrize(
    ("choice", "kind", "expected"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "cuda", "bfloat16"),
        ("bfloat16", "cpu", "bfloat16"),
        ("float32", "cuda", "float32"),
    ],
)
def test_auto_follows_the_checkpoint_only_where_the_device_can(
    choice: DtypeChoice, kind: DeviceKind, expected: ComputeDtype
) -> None:
    assert choose_compute_dtype(choice, SPEC, kind, deterministic=False) == expected


def test_deterministic_mode_is_float32_on_cpu() -> None:
    assert choose_compute_dtype("auto", SPEC, "cpu", deterministic=True) == "float32"
    with pytest.raises(ConfigError, match="float32 only"):
        choose_compute_dtype("bfloat16", SPEC, "cpu", deterministic=True)
    with pytest.raises(ConfigError, match="on CPU only"):
        choose_compute_dtype("float32", SPEC, "cuda", deterministic=True)


def test_ranks_of_a_host_take_its_gpus_in_order() -> None:
    assert rank_device(HostDevices("cuda", 2), 1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="2 visible"):
        rank_device(HostDevices("cuda", 2), 2)


def test_cpu_ranks_share_the_cpu() -> None:
    assert rank_device(HostDevices("cpu", 0), 15) == torch.device("cpu")


def test_detection_agrees_with_torch() -> None:
    assert (detect_devices().kind == "cuda") == torch.cuda.is_available()


def test_compute_dtypes_have_torch_twins() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    assert torch_dtype("float32") is torch.float32
