"""Random checkpoints of a few hundred kilobytes that transformers loads unchanged. Seeded, no transformers.

Gates are drawn wide, so that near-ties between experts are rare, and the head too, so that greedy choices are clear.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.model_config.read import read_model_spec
from expert_workers.model.checkpoint import INDEX_FILE, SINGLE_FILE, tensor_shapes

ABSENT = object()
"""In place of a value: the config has no such key."""

DEMO_MODEL_DIR = Path(__file__).resolve().parents[2] / "deploy" / "demo_model"

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "dtype": "float32",
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "v_head_dim": 16,
    "vocab_size": 3072,
}
"""DeepSeek-V3 in transformers 5's spelling."""

QWEN3_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 0,
    "decoder_sparse_step": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 16,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 3072,
}
"""Qwen3-MoE in transformers 5's spelling."""

_DEEPSEEK_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_query_rank": {"q_lora_rank": None, "tie_word_embeddings": True},
    "half_rotation": {
        "rope_interleave": False,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.8,
            "mscale_all_dim": 1.2,
        },
    },
    "yarn_plain": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 512,
        },
        "rope_interleave": False,
    },
    "one_group": {"n_group": 1, "topk_group": 1, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "all_dense_but_one": {"first_k_dense_replace": 2, "n_shared_experts": 2},
    "no_dense": {"first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "attention_bias": {"attention_bias": True, "rms_norm_eps": 1e-5},
    "odd_sizes": {
        "hidden_size": 60,
        "intermediate_size": 90,
        "moe_intermediate_size": 18,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "q_lora_rank": 22,
        "kv_lora_rank": 26,
        "n_routed_experts": 24,
        "n_group": 3,
        "topk_group": 1,
        "num_experts_per_tok": 5,
    },
    "one_head": {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_size": 32,
        "kv_lora_rank": 16,
    },
    "many_experts": {
        "n_routed_experts": 320,
        "n_group": 8,
        "topk_group": 3,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 8,
    },
}
_QWEN3_VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_one_kv_head": {
        "num_key_value_heads": 1,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
    },
    "qwen3_as_many_kv_heads": {
        "num_key_value_heads": 4,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "qwen3_sparse_step": {
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "head_dim": ABSENT,
    },
    "qwen3_yarn": {
        "num_hidden_layers": 3,
        "mlp_only_layers": [0, 2],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
    "qwen3_odd_sizes": {
        "hidden_size": 60,
        "head_dim": 10,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "moe_intermediate_size": 18,
        "num_local_experts": 24,
        "num_experts_per_tok": 5,
    },
    "qwen3_128_experts": {
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 8,
        "attention_bias": True,
    },
    "qwen3_320_experts": {
        "num_local_experts": 320,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 8,
        "norm_topk_prob": False,
    },
}


def _variant(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (config | overrides).items() if value is not ABSENT}


QWEN3_VARIANTS = {n: _variant(QWEN3_CONFIG, o) for n, o in _QWEN3_VARIANTS.items()}
SHAPE_VARIANTS = {
    n: _variant(TINY_CONFIG, o) for n, o in _DEEPSEEK_VARIANTS.items()
} | QWEN3_VARIANTS
"""Configs by name: together they take every branch of the model."""


@dataclass(frozen=True)
class CheckpointForm:
    """How a checkpoint lies on disk. stacked_experts: one tensor for all experts of a layer, as transformers 5 may."""

    hub_spelling: bool = False
    stacked_experts: bool = False
    num_shards: int = 1
    dtype: torch.dtype = torch.float32
    extra_tensors: dict[str, Tensor] = field(default_factory=dict)


def write_tiny_checkpoint(
    model_dir: Path, *, seed: int, form: CheckpointForm | None = None, **overrides: Any
) -> Path:
    """A tiny DeepSeek-V3, of TINY_CONFIG with these changes. Returns `model_dir`."""
    return write_variant(model_dir, TINY_CONFIG | overrides, seed=seed, form=form)


def write_variant(
    model_dir: Path, config: dict[str, Any], *, seed: int, form: CheckpointForm | None = None
) -> Path:
    """Config, generation config, the demo model's tokenizer and random weights. Returns `model_dir`."""
    form = form or CheckpointForm()
    model_dir.mkdir(parents=True, exist_ok=True)
    config = config | {"dtype": str(form.dtype).removeprefix("torch.")}
    write_json(model_dir / "config.json", hub_spelling(config) if form.hub_spelling else config)
    write_json(model_dir / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [2, 0]})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_MODEL_DIR / name, model_dir / name)
    tensors = dict(_random_tensors(model_dir, seed, form.dtype)) | form.extra_tensors
    _save(model_dir, _stacked(tensors) if form.stacked_experts else tensors, form.num_shards)
    return model_dir


def write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2), encoding="utf-8")


_HUB_KEYS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "ep_size": 1,
        "seq_aux": True,
        "aux_loss_alpha": 0.001,
    },
    "qwen3_moe": {
        "max_window_layers": 2,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    },
}


def hub_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The same config with the Hub's keys: rope_theta at top level, torch_dtype, the switches written out."""
    other_names = {"num_local_experts": "num_experts", "dtype": "torch_dtype"}
    renamed = {
        other_names.get(key, key): value
        for key, value in config.items()
        if key != "rope_parameters"
    }
    scaling = dict(config["rope_parameters"])
    rope_theta, rope_type = scaling.pop("rope_theta"), scaling.pop("rope_type")
    return renamed | {
        "rope_theta": rope_theta,
        "rope_scaling": scaling | {"type": rope_type} if scaling else None,
        **_HUB_KEYS[config["model_type"]],
    }


def _random_tensors(model_dir: Path, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in tensor_shapes(read_model_spec(model_dir)):
        tensor = torch.randn(shape, generator=generator) * _scale(name, shape)
        if "norm" in name:
            tensor += 1.0
        keep_wide = name.endswith("e_score_correction_bias")
        yield name, tensor if keep_wide else tensor.to(dtype)


def _scale(name: str, shape: tuple[int, ...]) -> float:
    if "norm" in name or name.endswith("bias"):
        return 0.1
    if "embed_tokens" in name:
        return 1.0
    if name.endswith("mlp.gate.weight"):
        return 3.0 * shape[1] ** -0.5
    if "lm_head" in name:
        return 4.0 * shape[1] ** -0.5
    return float(shape[-1] ** -0.5)


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights in the tensors that transformers' modules hold."""
    expert = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    parts = {name: match for name in tensors if (match := expert.fullmatch(name))}
    stacked = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for experts in dict.fromkeys(match[1] for match in parts.values()):
        numbers = sorted({int(match[2]) for match in parts.values() if match[1] == experts})
        gate, up, down = (
            torch.stack([tensors[f"{experts}.{n}.{name}_proj.weight"] for n in numbers])
            for name in ("gate", "up", "down")
        )
        stacked |= {
            f"{experts}.gate_up_proj": torch.cat([gate, up], dim=1),
            f"{experts}.down_proj": down,
        }
    return stacked


def _save(model_dir: Path, tensors: dict[str, Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, model_dir / SINGLE_FILE, metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        chosen = names[shard::num_shards]
        save_file(
            {name: tensors[name] for name in chosen}, model_dir / file, metadata={"format": "pt"}
        )
        weight_map |= dict.fromkeys(chosen, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(
        model_dir / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map}
    )
