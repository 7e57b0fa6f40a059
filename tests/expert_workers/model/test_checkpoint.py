import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

from cluster.errors import CheckpointError
from cluster.model_config.read import read_model_spec
from expert_workers.model.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    check_checkpoint,
    described_tensors,
    weight_files,
)
from tests.helpers.tiny_checkpoints import (
    DEMO_MODEL_DIR,
    SHAPE_VARIANTS,
    CheckpointForm,
    write_json,
    write_tiny_checkpoint,
    write_variant,
)

GATE = "model.layers.1.mlp.gate.weight"


def write_checkpoint(model_dir: Path, **form: Any) -> Path:
    return write_tiny_checkpoint(model_dir, seed=1, form=CheckpointForm(**form))


def check(model_dir: Path) -> dict[str, Any]:
    return check_checkpoint(model_dir, read_model_spec(model_dir))


def rewrite_header(file: Path, name: str, **changes: Any) -> None:
    """Changes one tensor's entry; the data stay where they are."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header[name] |= changes
    packed = json.dumps(header).encode()
    file.write_bytes(len(packed).to_bytes(8, "little") + packed + content[end:])


def test_every_tensor_of_the_demo_model_is_found() -> None:
    entries = check(DEMO_MODEL_DIR)
    assert sum(entry.num_bytes for entry in entries.values()) > 14_000_000


def test_shards_hold_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    whole = check(write_checkpoint(tmp_path / "whole"))
    sharded = check(write_checkpoint(tmp_path / "sharded", num_shards=3))
    assert {n: e.shape for n, e in sharded.items()} == {n: e.shape for n, e in whole.items()}
    assert len({entry.file.name for entry in sharded.values()}) == 3


def test_tensors_of_prediction_layers_are_skipped(tmp_path: Path) -> None:
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(4, 4)}
    assert not extra.keys() & check(write_checkpoint(tmp_path, extra_tensors=extra)).keys()


def test_wrong_shape_names_file_tensor_and_both_shapes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    rewrite_header(tmp_path / SINGLE_FILE, GATE, shape=[64, 16])
    expected = rf"{SINGLE_FILE}: tensor {GATE} has shape \[64, 16\], expected \[16, 64\]"
    with pytest.raises(CheckpointError, match=expected):
        check(tmp_path)


def test_unsupported_dtype_names_file_tensor_and_what_is_supported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    rewrite_header(tmp_path / SINGLE_FILE, GATE, dtype="F8_E4M3")
    with pytest.raises(
        CheckpointError, match=rf"{GATE} has dtype F8_E4M3, supported: BF16, F16, F32"
    ):
        check(tmp_path)


def test_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"attention_bias": True})
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.self_attn\.q_a_proj\.bias \[32\] is missing"
    ):
        check(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attention_bias", True, r"q_proj\.bias \[96\] is missing"),
        ("num_key_value_heads", 4, r"k_proj\.weight has shape \[48, 64\], expected \[96, 64\]"),
        ("mlp_only_layers", [0], r"layers\.0\.mlp\.gate_proj\.weight \[96, 64\] is missing"),
        ("num_local_experts", 17, r"mlp\.gate\.weight has shape \[16, 64\], expected \[17, 64\]"),
    ],
)
def test_a_config_that_says_otherwise_is_told_by_tensor_and_shape(
    tmp_path: Path, key: str, value: Any, expected: str
) -> None:
    write_variant(tmp_path, SHAPE_VARIANTS["qwen3"], seed=1)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {key: value})
    with pytest.raises(CheckpointError, match=expected):
        check(tmp_path)


@pytest.mark.parametrize("name", ["plain", "qwen3"])
def test_stacked_experts_are_found_one_by_one(tmp_path: Path, name: str) -> None:
    whole, stacked = (
        check(write_variant(tmp_path / str(form), SHAPE_VARIANTS[name], seed=1, form=form))
        for form in (CheckpointForm(), CheckpointForm(stacked_experts=True))
    )
    assert {n: e.shape for n, e in stacked.items()} == {n: e.shape for n, e in whole.items()}
    assert {n: e.num_bytes for n, e in stacked.items()} == {
        n: e.num_bytes for n, e in whole.items()
    }


def test_wrong_shape_of_a_stack_names_it_and_both_shapes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, stacked_experts=True)
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    rewrite_header(tmp_path / SINGLE_FILE, stack, shape=[16, 32, 128])
    expected = rf"tensor {stack} has shape \[16, 32, 128\], expected \[16, 64, 64\]"
    with pytest.raises(CheckpointError, match=expected):
        check(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"shard model-00002-of-00003\.safetensors is missing"
    ):
        check(tmp_path)


def test_tensor_that_only_the_index_knows_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_shards=2)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-00002.safetensors"
    write_json(tmp_path / INDEX_FILE, index)
    with pytest.raises(CheckpointError, match=r"model\.ghost is missing, the index promises it"):
        check(tmp_path)


def test_index_may_not_point_out_of_the_directory(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    write_json(tmp_path / INDEX_FILE, {"weight_map": {GATE: "../model.safetensors"}})
    with pytest.raises(CheckpointError, match="not a plain file name"):
        check(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_unreadable_index_is_one_clear_error(tmp_path: Path, text: str) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        check(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 5, 300, 200_000])
def test_file_cut_short_is_named(tmp_path: Path, num_bytes: int) -> None:
    file = write_checkpoint(tmp_path) / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: not a whole safetensors file"):
        check(tmp_path)


def test_file_with_bytes_that_no_tensor_claims_is_refused(tmp_path: Path) -> None:
    """The safetensors library does not open it either."""
    file = write_checkpoint(tmp_path) / SINGLE_FILE
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match=r"bytes of data where its header declares"):
        check(tmp_path)


@pytest.mark.parametrize("changes", [{"shape": [15, 64]}, {"data_offsets": [0, 4096]}])
def test_tensor_that_does_not_lie_where_it_should_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    file = write_checkpoint(tmp_path) / SINGLE_FILE
    rewrite_header(file, GATE, **changes)
    with pytest.raises(CheckpointError, match=r"not a whole safetensors file: tensor .* byte"):
        check(tmp_path)
    with pytest.raises(SafetensorError):
        safe_open(file, framework="pt").__enter__()


def test_a_config_alone_describes_the_tensors_of_its_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    found = {name: (e.shape, e.dtype) for name, e in check(tmp_path).items()}
    (tmp_path / SINGLE_FILE).unlink()
    described = described_tensors(tmp_path, read_model_spec(tmp_path))
    assert {name: (e.shape, e.dtype) for name, e in described.items()} == found
    assert weight_files(tmp_path) == []


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path) / SINGLE_FILE).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin: pickled weights are not loaded"
    ):
        check(tmp_path)


def test_directory_without_weights_says_what_it_needs(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path) / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        check(tmp_path)


def test_checking_does_not_import_torch() -> None:
    code = "import sys, expert_workers.model.checkpoint; sys.exit('torch' in sys.modules)"
    root = DEMO_MODEL_DIR.parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
