"""A rank's weights: its own experts and the replicated rest, read from the memory-mapped checkpoint.

Letters: H hidden, V vocabulary, I intermediate, E experts of this rank, Hd heads, Hk KV heads, d head size, r latent
width.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.errors import CheckpointError
from cluster.model_spec import AttentionSpec, ComputeDtype, GqaSpec, MlaSpec, ModelSpec
from cluster.placement import ExpertPlacement
from expert_workers.model.checkpoint import TensorEntry, check_checkpoint

LoadProgress = Callable[[int, int], None]
"""Called with (done bytes, total bytes) of this rank's share of the checkpoint."""
_EXPERTS = ".mlp.experts."
"""In the names of tensors that belong to one expert."""


@dataclass(frozen=True)
class MlpWeights:
    """gate_up: [2 I, H], the gate's rows first; down: [H, I]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """gate_up: [E, 2 I, H]; down: [E, H, I]; in the placement's local order."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class GateWeights:
    """Never narrowed: routes hang on them.

    weight: [experts, H] float32; score_correction_bias: [experts] float32, None for gates that know none
    """

    weight: Tensor
    score_correction_bias: Tensor | None


@dataclass(frozen=True)
class MoeWeights:
    gate: GateWeights
    experts: ExpertWeights
    shared_experts: MlpWeights | None


@dataclass(frozen=True)
class MlaWeights:
    """Queries come through q_a, its norm and q_b, or through q_b alone. kv_b is split per head for the absorbed form.

    q_a: [q rank, H]; q_b: [Hd · (nope + rope), q rank or H]; kv_a: [r + rope, H]; output: [H, Hd · v]
    key_up: [Hd, nope, r], value_up: [Hd, r, v]; biases are None without `attention_bias`
    """

    q_a: Tensor | None
    q_a_bias: Tensor | None
    q_a_norm: Tensor | None
    q_b: Tensor
    kv_a: Tensor
    kv_a_bias: Tensor | None
    kv_a_norm: Tensor
    key_up: Tensor
    value_up: Tensor
    output: Tensor
    output_bias: Tensor | None


@dataclass(frozen=True)
class GqaWeights:
    """query: [Hd · d, H]; key_value: [2 · Hk · d, H], the keys of all KV heads first; output: [H, Hd · d]

    query_norm, key_norm: [d]; biases are None without `attention_bias`
    """

    query: Tensor
    query_bias: Tensor | None
    query_norm: Tensor
    key_value: Tensor
    key_value_bias: Tensor | None
    key_norm: Tensor
    output: Tensor
    output_bias: Tensor | None


AttentionWeights = MlaWeights | GqaWeights


@dataclass(frozen=True)
class LayerWeights:
    input_norm: Tensor
    attention: AttentionWeights
    post_attention_norm: Tensor
    feed_forward: MlpWeights | MoeWeights


@dataclass(frozen=True)
class ModelWeights:
    """embedding: [V, H]; head: [V, H], the embedding itself when tied; norm: [H]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


@dataclass(frozen=True)
class WeightTarget:
    """Whose share is loaded, and into what."""

    placement: ExpertPlacement
    rank: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class WeightShare:
    """Bytes in a rank's memory: of what every rank holds, and of its experts."""

    replicated_bytes: int
    expert_bytes: int


def load_weights(
    model_dir: Path, spec: ModelSpec, target: WeightTarget, progress: LoadProgress | None = None
) -> ModelWeights:
    """Reads the replicated part and this rank's experts, converted to the target's dtype.

    Raises CheckpointError as `check_checkpoint` does, or when a file cannot be read.
    """
    entries = check_checkpoint(model_dir, spec)
    local_experts = [int(expert) for expert in target.placement.local_experts(target.rank)]
    with ExitStack() as stack:
        reader = _Reader(stack, entries, target, progress)
        reader.total_bytes = sum(e.num_bytes for e in _share(entries, local_experts).values())
        try:
            return _load(reader, spec, local_experts)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{model_dir}: cannot be read: {error}") from error


def weight_share(
    entries: dict[str, TensorEntry], local_experts: Iterable[int], dtype: ComputeDtype
) -> WeightShare:
    """What `load_weights` will hold for a rank with these experts, from the headers alone."""
    width = 4 if dtype == "float32" else 2
    num_bytes = {True: 0, False: 0}
    for name, entry in _share(entries, local_experts).items():
        in_float32 = ".mlp.gate." in name  # see GateWeights
        num_bytes[_EXPERTS in name] += math.prod(entry.shape) * (4 if in_float32 else width)
    return WeightShare(replicated_bytes=num_bytes[False], expert_bytes=num_bytes[True])


def _share(entries: dict[str, TensorEntry], local_experts: Iterable[int]) -> dict[str, TensorEntry]:
    """The tensors that a rank reads."""
    mine = {str(expert) for expert in local_experts}
    return {
        name: entry
        for name, entry in entries.items()
        if _EXPERTS not in name or name.partition(_EXPERTS)[2].partition(".")[0] in mine
    }


class _Reader:
    """Owner of the open files while loading and of the count of bytes read."""

    def __init__(
        self,
        stack: ExitStack,
        entries: dict[str, TensorEntry],
        target: WeightTarget,
        progress: LoadProgress | None,
    ) -> None:
        self._stack = stack
        self._entries = entries
        self._target = target
        self._progress = progress
        self._files: dict[Path, Any] = {}
        self._done_bytes = 0
        self.total_bytes = 0

    def mapped(self, name: str) -> Tensor:
        """The tensor as the file holds it: a view of the mapping, dtype and all."""
        entry = self._entries[name]
        if entry.file not in self._files:
            opened = self._stack.enter_context(safe_open(entry.file, framework="pt"))
            self._files[entry.file] = opened
        tensor = _mapped(self._files[entry.file], name, entry)
        self._done_bytes += entry.num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self.total_bytes)
        return tensor

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of its own on the target's device, so that the mapping can be closed."""
        copied = torch.empty(
            self._entries[name].shape,
            dtype=dtype or self._target.dtype,
            device=self._target.device,
        )
        return copied.copy_(self.mapped(name))

    def optional(self, name: str, dtype: torch.dtype | None = None) -> Tensor | None:
        return self.tensor(name, dtype) if name in self._entries else None

    def stacked(self, names: list[list[str]]) -> Tensor:
        """[len(names), rows, columns]: per entry the named matrices one below the other."""
        rows = [self._entries[name].shape[0] for name in names[0]]
        columns = self._entries[names[0][0]].shape[1]
        shape = (len(names), sum(rows), columns)
        stacked = torch.empty(shape, dtype=self._target.dtype, device=self._target.device)
        for slot, parts in zip(stacked, names, strict=True):
            for part, name in zip(torch.split(slot, rows), parts, strict=True):
                part.copy_(self.mapped(name))
        return stacked


def _mapped(file: Any, name: str, entry: TensorEntry) -> Tensor:
    part = entry.part
    if part is None:
        whole: Tensor = file.get_tensor(name)
        return whole
    end_row = part.first_row + entry.shape[0]
    rows: Tensor = file.get_slice(part.tensor)[part.expert, part.first_row : end_row]
    return rows


def _load(reader: _Reader, spec: ModelSpec, local_experts: list[int]) -> ModelWeights:
    embedding = reader.tensor("model.embed_tokens.weight")
    layers = tuple(_load_layer(reader, spec, i, local_experts) for i in range(spec.num_layers))
    return ModelWeights(
        embedding=embedding,
        layers=layers,
        norm=reader.tensor("model.norm.weight"),
        head=embedding if spec.tie_word_embeddings else reader.tensor("lm_head.weight"),
    )


def _load_layer(
    reader: _Reader, spec: ModelSpec, layer: int, local_experts: list[int]
) -> LayerWeights:
    prefix = f"model.layers.{layer}"
    has_experts = layer in spec.moe_layers
    return LayerWeights(
        input_norm=reader.tensor(f"{prefix}.input_layernorm.weight"),
        attention=_load_attention(reader, f"{prefix}.self_attn", spec.attention),
        post_attention_norm=reader.tensor(f"{prefix}.post_attention_layernorm.weight"),
        feed_forward=_load_moe(reader, f"{prefix}.mlp", spec, local_experts)
        if has_experts
        else _load_mlp(reader, f"{prefix}.mlp"),
    )


def _load_attention(reader: _Reader, prefix: str, attention: AttentionSpec) -> AttentionWeights:
    if isinstance(attention, MlaSpec):
        return _load_mla(reader, prefix, attention)
    return _load_gqa(reader, prefix, attention)


def _load_mla(reader: _Reader, prefix: str, mla: MlaSpec) -> MlaWeights:
    low_rank = mla.q_lora_rank is not None
    kv_b = reader.tensor(f"{prefix}.kv_b_proj.weight").view(
        mla.num_heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank
    )
    key_up, value_up = torch.split(kv_b, [mla.qk_nope_head_dim, mla.v_head_dim], dim=1)
    return MlaWeights(
        q_a=reader.tensor(f"{prefix}.q_a_proj.weight") if low_rank else None,
        q_a_bias=reader.optional(f"{prefix}.q_a_proj.bias"),
        q_a_norm=reader.tensor(f"{prefix}.q_a_layernorm.weight") if low_rank else None,
        q_b=reader.tensor(f"{prefix}.{'q_b_proj' if low_rank else 'q_proj'}.weight"),
        kv_a=reader.tensor(f"{prefix}.kv_a_proj_with_mqa.weight"),
        kv_a_bias=reader.optional(f"{prefix}.kv_a_proj_with_mqa.bias"),
        kv_a_norm=reader.tensor(f"{prefix}.kv_a_layernorm.weight"),
        key_up=key_up.contiguous(),
        value_up=value_up.transpose(1, 2).contiguous(),
        output=reader.tensor(f"{prefix}.o_proj.weight"),
        output_bias=reader.optional(f"{prefix}.o_proj.bias"),
    )


def _load_gqa(reader: _Reader, prefix: str, gqa: GqaSpec) -> GqaWeights:
    key_value = [f"{prefix}.k_proj", f"{prefix}.v_proj"]
    biases = [reader.tensor(f"{name}.bias") for name in key_value if gqa.attention_bias]
    return GqaWeights(
        query=reader.tensor(f"{prefix}.q_proj.weight"),
        query_bias=reader.optional(f"{prefix}.q_proj.bias"),
        query_norm=reader.tensor(f"{prefix}.q_norm.weight"),
        key_value=reader.stacked([[f"{name}.weight" for name in key_value]])[0],
        key_value_bias=torch.cat(biases) if biases else None,
        key_norm=reader.tensor(f"{prefix}.k_norm.weight"),
        output=reader.tensor(f"{prefix}.o_proj.weight"),
        output_bias=reader.optional(f"{prefix}.o_proj.bias"),
    )


def _load_mlp(reader: _Reader, prefix: str) -> MlpWeights:
    gate_up = [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]
    return MlpWeights(reader.stacked([gate_up])[0], reader.tensor(f"{prefix}.down_proj.weight"))


def _load_moe(
    reader: _Reader, prefix: str, spec: ModelSpec, local_experts: list[int]
) -> MoeWeights:
    experts = [f"{prefix}.experts.{expert}" for expert in local_experts]
    gate_up = [[f"{e}.gate_proj.weight", f"{e}.up_proj.weight"] for e in experts]
    shared = f"{prefix}.shared_experts"
    return MoeWeights(
        gate=GateWeights(
            reader.tensor(f"{prefix}.gate.weight", torch.float32),
            reader.optional(f"{prefix}.gate.e_score_correction_bias", torch.float32),
        ),
        experts=ExpertWeights(
            reader.stacked(gate_up), reader.stacked([[f"{e}.down_proj.weight"] for e in experts])
        ),
        shared_experts=_load_mlp(reader, shared) if spec.num_shared_experts else None,
    )
