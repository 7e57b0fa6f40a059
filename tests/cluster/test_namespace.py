"""Namespaces and model fingerprints are defined by content, and by nothing else."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cluster.errors import CheckpointError
from cluster.namespace import model_fingerprint, namespace_of, weight_version

ROOT = Path(__file__).parents[2]
PRINT_NAMESPACE = (
    "from cluster.namespace import namespace_of;"
    "print(namespace_of('f' * 64, block_size=16, tenant=None, cache_salt='tenant é'))"
)


def make_checkpoint(folder: Path, *, scale: float = 1.0, config: str = '{"layers": 2}') -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    ones = np.ones((64, 128), np.float32)
    save_file({"first": ones, "second": ones * scale}, folder / "model.safetensors")
    return folder


def test_namespaces_are_the_same_in_every_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PRINT_NAMESPACE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "1", "12345")
    }

    assert outputs == {namespace_of("f" * 64, block_size=16, tenant=None, cache_salt="tenant é")}


def test_requests_with_equal_salts_share_and_all_others_are_apart() -> None:
    salts = [None, "", "a", "b", "null", "a ", "\ud800"]

    namespaces = {
        namespace_of("model", block_size=16, tenant=None, cache_salt=salt) for salt in salts
    }

    assert len(namespaces) == len(salts)
    assert namespace_of("model", block_size=16, tenant=None, cache_salt="a") in namespaces


def test_a_salt_parts_only_what_one_tenant_sends() -> None:
    pairs = [(None, None), (None, "a"), ("a", None), ("a", "a"), ("a", "b"), ("b", "a"), ("", None)]

    namespaces = {
        namespace_of("model", block_size=16, tenant=tenant, cache_salt=salt)
        for tenant, salt in pairs
    }

    assert len(namespaces) == len(pairs)


def test_models_and_block_sizes_are_apart() -> None:
    namespaces = {
        namespace_of(model, block_size=block_size, tenant=None, cache_salt=None)
        for model in ("one", "two")
        for block_size in (16, 32)
    }

    assert len(namespaces) == 4


def test_a_copy_of_a_checkpoint_has_the_same_fingerprint(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path / "first")
    second = make_checkpoint(tmp_path / "elsewhere" / "second")

    assert model_fingerprint(first, "float32") == model_fingerprint(second, "float32")


@pytest.mark.parametrize("limit_bytes", [2**30, 0], ids=["whole", "samples"])
def test_other_weights_config_or_dtype_give_another_fingerprint(
    tmp_path: Path, limit_bytes: int
) -> None:
    folders = [
        make_checkpoint(tmp_path / "a" / "model"),
        make_checkpoint(tmp_path / "b" / "model", scale=2.0),
        make_checkpoint(tmp_path / "c" / "model", config='{"layers": 3}'),
    ]

    fingerprints = {
        model_fingerprint(folder, dtype, whole_hash_limit_bytes=limit_bytes)
        for folder in folders
        for dtype in ("float32", "bfloat16")
    }

    assert len(fingerprints) == 6


def test_any_changed_byte_counts_below_the_whole_hash_limit(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    before = model_fingerprint(folder, "float32")
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-9000] ^= 1
    file.write_bytes(content)

    assert model_fingerprint(folder, "float32") != before


@pytest.mark.parametrize("back", [1, 16384, 32768], ids=["end", "middle", "start"])
def test_above_the_limit_start_middle_and_end_of_each_tensor_count(
    tmp_path: Path, back: int
) -> None:
    folder = make_checkpoint(tmp_path / "model")  # the last tensor holds 32,768 bytes
    before = model_fingerprint(folder, "float32", whole_hash_limit_bytes=0)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-back] ^= 1
    file.write_bytes(content)

    assert model_fingerprint(folder, "float32", whole_hash_limit_bytes=0) != before


def test_a_folder_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        model_fingerprint(tmp_path, "float32")
    folder = make_checkpoint(tmp_path / "model")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        model_fingerprint(folder, "float32")


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, (9).to_bytes(8, "little") + b"not json!"])
def test_a_damaged_file_above_the_limit_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = make_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        model_fingerprint(folder, "float32", whole_hash_limit_bytes=-1)


def test_tensor_entries_without_offsets_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    header = json.dumps({"first": {"dtype": "F32"}}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(CheckpointError, match="data_offsets"):
        model_fingerprint(folder, "float32", whole_hash_limit_bytes=0)


def test_a_weight_version_is_the_start_of_the_fingerprint() -> None:
    fingerprint = "0123456789abcdef" * 4
    assert weight_version(fingerprint) == "0123456789abcdef"


def test_a_fingerprint_of_all_bytes_never_holds_many_of_them(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    save_file({"large": np.zeros(2**22, np.float32)}, folder / "more.safetensors")
    tracemalloc.start()
    model_fingerprint(folder, "float32")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 2**20
