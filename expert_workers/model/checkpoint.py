"""A checkpoint's files without their weights: which tensor lies where, its shape and dtype. Headers only, no torch.

safetensors with or without model.safetensors.index.json; never pickle. Loading is `weights.py`.
"""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from cluster.errors import CheckpointError
from cluster.model_spec import AttentionSpec, GqaSpec, MlaSpec, ModelSpec, SigmoidGateSpec

SUPPORTED_DTYPES = {"BF16": 2, "F16": 2, "F32": 4}
"""safetensors dtype names and bytes per value."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_OTHER_WEIGHTS = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5")
_MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors library itself
_UNREADABLE = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError),
    *(struct.error, RecursionError),
)
"""What a file can raise that is not what it should be."""


_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors [experts, rows, columns] that transformers 5 may keep instead of a matrix per expert, and what they stack."""


@dataclass(frozen=True)
class StackPart:
    """Rows of one expert, from `first_row` on, in a tensor that stacks all experts of a layer."""

    tensor: str
    expert: int
    first_row: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint as its file's header declares it; `part`: it is a part of another one there."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    part: StackPart | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * SUPPORTED_DTYPES.get(self.dtype, 0)


def check_checkpoint(model_dir: Path, spec: ModelSpec) -> dict[str, TensorEntry]:
    """Where each tensor of the model is, once all are known to be there with the right shape and a supported dtype.

    Experts that lie stacked in one tensor per layer have their own entries all the same. Tensors that the model does
    not need (multi-token prediction layers, inverse frequencies) are left out.
    Raises CheckpointError naming file, tensor, found and expected shape or dtype, or the missing shard.
    """
    present = read_tensor_entries(model_dir)
    present |= dict(_stacked_experts(present, spec))
    needed: dict[str, TensorEntry] = {}
    for name, shape in tensor_shapes(spec):
        entry = present.get(name)
        if entry is None:
            raise CheckpointError(
                f"{model_dir}: tensor {name} {list(shape)} is missing, config.json asks for it; "
                "the two must be of one model"
            )
        _check_entry(name, entry, shape)
        needed[name] = entry
    return needed


def _stacked_experts(
    present: dict[str, TensorEntry], spec: ModelSpec
) -> Iterator[tuple[str, TensorEntry]]:
    num_experts, hidden_size = spec.gate.num_experts, spec.hidden_size
    shapes = {
        name.removesuffix(".weight").removeprefix("."): shape
        for name, shape in _mlp_shapes("", hidden_size, spec.moe_intermediate_size)
    }
    for layer, (stack, projections) in product(spec.moe_layers, _STACKS.items()):
        experts = f"model.layers.{layer}.mlp.experts"
        name = f"{experts}.{stack}"
        if name not in present:
            continue
        rows, columns = shapes[projections[0]]
        _check_entry(name, present[name], (num_experts, len(projections) * rows, columns))
        file, dtype = present[name].file, present[name].dtype
        for expert, (place, projection) in product(range(num_experts), enumerate(projections)):
            part = StackPart(name, expert, place * rows)
            yield (
                f"{experts}.{expert}.{projection}.weight",
                TensorEntry(file, dtype, (rows, columns), part),
            )


def _check_entry(name: str, entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise CheckpointError(
            f"{entry.file}: tensor {name} has shape {list(entry.shape)}, expected {list(shape)} "
            "from config.json"
        )
    if entry.dtype not in SUPPORTED_DTYPES:
        raise CheckpointError(
            f"{entry.file}: tensor {name} has dtype {entry.dtype}, supported: "
            f"{', '.join(SUPPORTED_DTYPES)}; convert the checkpoint"
        )


def read_tensor_entries(model_dir: Path) -> dict[str, TensorEntry]:
    """Every tensor of the directory's safetensors files, by name. Raises CheckpointError."""
    index_file, single_file = model_dir / INDEX_FILE, model_dir / SINGLE_FILE
    if index_file.is_file():
        return _read_sharded(model_dir, index_file)
    if single_file.is_file():
        return _read_header(single_file)
    others = weight_files(model_dir)
    if others and not others[0].name.endswith(".safetensors"):
        raise CheckpointError(
            f"{others[0]}: pickled weights are not loaded, nor any but safetensors; convert them"
        )
    raise CheckpointError(
        f"{model_dir}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; weights must lie in safetensors "
        "files, several of them with their index"
    )


def weight_files(model_dir: Path) -> list[Path]:
    """Files that hold weights or list them, of any kind, safetensors first; none: the directory is a config alone."""
    return [
        file
        for pattern in ("*.safetensors", INDEX_FILE, *_OTHER_WEIGHTS)
        for file in sorted(model_dir.glob(pattern))
    ]


def described_tensors(model_dir: Path, spec: ModelSpec) -> dict[str, TensorEntry]:
    """The tensors that a checkpoint of this config would have, by name, all in the config's dtype. Reads nothing."""
    dtype = "F32" if spec.checkpoint_dtype == "float32" else "BF16"
    file = model_dir / SINGLE_FILE
    return {name: TensorEntry(file, dtype, shape) for name, shape in tensor_shapes(spec)}


def _read_sharded(model_dir: Path, index_file: Path) -> dict[str, TensorEntry]:
    try:
        weight_map = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
        shards = {str(name): str(shard) for name, shard in weight_map.items()}
    except OSError as error:
        raise CheckpointError(f"{index_file}: cannot be read: {error.strerror}") from error
    except _UNREADABLE as error:
        raise CheckpointError(f"{index_file}: holds no readable weight_map: {error!r}") from error
    headers = {}
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index_file}: shard {shard!r} is not a plain file name")
        if not (model_dir / shard).is_file():
            raise CheckpointError(
                f"{index_file}: shard {shard} is missing in {model_dir}; fetch it"
            )
        headers[shard] = _read_header(model_dir / shard)
    entries = {}
    for name, shard in shards.items():
        if name not in headers[shard]:
            raise CheckpointError(
                f"{model_dir / shard}: tensor {name} is missing, the index promises it; fetch shard "
                "and index again"
            )
        entries[name] = headers[shard][name]
    return entries


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """safetensors: 8 bytes length, that much JSON, then the data that `data_offsets` point into."""
    try:
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            if header_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {header_bytes} bytes")
            header: dict[str, Any] = json.loads(stream.read(header_bytes))
        header.pop("__metadata__", None)
        entries = {
            name: TensorEntry(file, str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in header.items()
        }
        spans = {name: tuple(map(int, entry["data_offsets"])) for name, entry in header.items()}
        _check_spans(entries, spans, data_bytes=file.stat().st_size - 8 - header_bytes)
        return entries
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{file}: not a whole safetensors file: {error}; fetch it again"
        ) from error


def _check_spans(
    entries: dict[str, TensorEntry], spans: dict[str, tuple[int, ...]], *, data_bytes: int
) -> None:
    """Tensors lie one behind the other and fill the file, each as long as its shape and dtype say: what the safetensors
    library asks for when it opens a file. Raises ValueError."""
    declared = max((end for _, end in spans.values()), default=0)
    if declared != data_bytes:
        raise ValueError(f"{data_bytes} bytes of data where its header declares {declared}")
    last = 0
    for name, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        entry = entries[name]
        if start != last:
            raise ValueError(f"tensor {name} starts at byte {start}, the one before ends at {last}")
        if entry.dtype in SUPPORTED_DTYPES and end - start != entry.num_bytes:
            raise ValueError(
                f"tensor {name} has {end - start} bytes, its shape and dtype need {entry.num_bytes}"
            )
        last = end


def tensor_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of the model, as transformers saves them."""
    yield "model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)
    yield "model.norm.weight", (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        yield "lm_head.weight", (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (spec.hidden_size,)
        yield f"{prefix}.post_attention_layernorm.weight", (spec.hidden_size,)
        yield from _attention_shapes(f"{prefix}.self_attn", spec.attention, spec.hidden_size)
        if layer in spec.moe_layers:
            yield from _moe_shapes(f"{prefix}.mlp", spec)
        else:
            yield from _mlp_shapes(f"{prefix}.mlp", spec.hidden_size, spec.intermediate_size)


def _attention_shapes(
    prefix: str, attention: AttentionSpec, hidden_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(attention, MlaSpec):
        return _mla_shapes(prefix, attention, hidden_size)
    return _gqa_shapes(prefix, attention, hidden_size)


def _mla_shapes(
    prefix: str, mla: MlaSpec, hidden_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    query_rows = mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    value_columns = mla.num_heads * mla.v_head_dim
    if mla.q_lora_rank is None:
        yield f"{prefix}.q_proj.weight", (query_rows, hidden_size)
    else:
        yield f"{prefix}.q_a_proj.weight", (mla.q_lora_rank, hidden_size)
        yield f"{prefix}.q_a_layernorm.weight", (mla.q_lora_rank,)
        yield f"{prefix}.q_b_proj.weight", (query_rows, mla.q_lora_rank)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (mla.kv_width, hidden_size)
    yield f"{prefix}.kv_a_layernorm.weight", (mla.kv_lora_rank,)
    key_value_rows = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield f"{prefix}.kv_b_proj.weight", (key_value_rows, mla.kv_lora_rank)
    yield f"{prefix}.o_proj.weight", (hidden_size, value_columns)
    if mla.attention_bias:
        if mla.q_lora_rank is not None:
            yield f"{prefix}.q_a_proj.bias", (mla.q_lora_rank,)
        yield f"{prefix}.kv_a_proj_with_mqa.bias", (mla.kv_width,)
        yield f"{prefix}.o_proj.bias", (hidden_size,)


def _gqa_shapes(
    prefix: str, gqa: GqaSpec, hidden_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    query_rows, kv_rows = gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
    for name, rows in (("q_proj", query_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
        yield f"{prefix}.{name}.weight", (rows, hidden_size)
        if gqa.attention_bias:
            yield f"{prefix}.{name}.bias", (rows,)
    yield f"{prefix}.q_norm.weight", (gqa.head_dim,)
    yield f"{prefix}.k_norm.weight", (gqa.head_dim,)
    yield f"{prefix}.o_proj.weight", (hidden_size, query_rows)
    if gqa.attention_bias:
        yield f"{prefix}.o_proj.bias", (hidden_size,)


def _moe_shapes(prefix: str, spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    num_experts, hidden_size = spec.gate.num_experts, spec.hidden_size
    yield f"{prefix}.gate.weight", (num_experts, hidden_size)
    if isinstance(spec.gate, SigmoidGateSpec):
        yield f"{prefix}.gate.e_score_correction_bias", (num_experts,)
    if spec.num_shared_experts:
        shared_size = spec.num_shared_experts * spec.moe_intermediate_size
        yield from _mlp_shapes(f"{prefix}.shared_experts", hidden_size, shared_size)
    for expert in range(num_experts):
        expert_prefix = f"{prefix}.experts.{expert}"
        yield from _mlp_shapes(expert_prefix, hidden_size, spec.moe_intermediate_size)


def _mlp_shapes(
    prefix: str, hidden_size: int, intermediate_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (intermediate_size, hidden_size)
    yield f"{prefix}.up_proj.weight", (intermediate_size, hidden_size)
    yield f"{prefix}.down_proj.weight", (hidden_size, intermediate_size)
