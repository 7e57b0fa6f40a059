"""Qwen3-MoE configs: the shapes of public models, both spellings, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from cluster.errors import CheckpointError
from cluster.model_config.read import read_model_spec
from cluster.model_spec import GqaSpec, SoftmaxGateSpec, YarnSpec
from tests.helpers.tiny_checkpoints import QWEN3_CONFIG, hub_spelling, write_json

SHARED_BY_PUBLIC_MODELS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
}
QWEN3_235B_A22B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}


def write_config(model_dir: Path, **overrides: Any) -> Path:
    write_json(model_dir / "config.json", QWEN3_CONFIG | overrides)
    return model_dir


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in QWEN3_CONFIG.items() if name != key}


def attention(model_dir: Path) -> GqaSpec:
    spec = read_model_spec(model_dir).attention
    assert isinstance(spec, GqaSpec)
    return spec


@pytest.mark.parametrize(
    ("sizes", "heads", "kv_bytes"),
    [(QWEN3_30B_A3B, 32, 98_304), (QWEN3_235B_A22B, 64, 192_512)],
    ids=["30B-A3B", "235B-A22B"],
)
def test_shapes_of_public_models_are_read(
    tmp_path: Path, sizes: dict[str, Any], heads: int, kv_bytes: int
) -> None:
    write_json(tmp_path / "config.json", SHARED_BY_PUBLIC_MODELS | sizes)
    spec = read_model_spec(tmp_path)
    assert (spec.num_layers, spec.num_moe_layers) == (sizes["num_hidden_layers"],) * 2
    assert attention(tmp_path).num_heads == heads
    assert spec.kv_bytes_per_token("bfloat16") == kv_bytes
    assert spec.gate == SoftmaxGateSpec(128, 8, norm_topk_prob=True)
    assert spec.checkpoint_dtype == "bfloat16"
    assert spec.num_shared_experts == 0


def test_both_spellings_say_the_same(tmp_path: Path) -> None:
    own = read_model_spec(write_config(tmp_path))
    write_json(tmp_path / "config.json", hub_spelling(QWEN3_CONFIG))
    assert read_model_spec(tmp_path) == own


def test_head_size_of_its_own_wins_over_the_derived_one(tmp_path: Path) -> None:
    assert attention(write_config(tmp_path, head_dim=24)).head_dim == 24
    assert attention(write_config(tmp_path, head_dim=None)).head_dim == 16
    write_json(tmp_path / "config.json", without("head_dim"))
    assert attention(tmp_path).rope.dim == 16


def test_a_token_s_kv_is_a_key_and_a_value_per_kv_head_and_layer(tmp_path: Path) -> None:
    spec = read_model_spec(write_config(tmp_path, num_key_value_heads=1))
    assert spec.kv_bytes_per_token("float32") == 2 * (24 + 24) * 4


@pytest.mark.parametrize(
    ("overrides", "moe_layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3, 4, 5)),
        ({"mlp_only_layers": [0, 3, 5]}, (1, 2, 4)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 4}, (3,)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 3]}, (1, 5)),
    ],
)
def test_layers_with_experts_follow_step_and_exceptions(
    tmp_path: Path, overrides: dict[str, Any], moe_layers: tuple[int, ...]
) -> None:
    spec = read_model_spec(write_config(tmp_path, num_hidden_layers=6, **overrides))
    assert spec.moe_layers == moe_layers
    assert spec.route_shape.num_moe_layers == len(moe_layers)


def test_renormalisation_is_off_where_the_config_says_nothing(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", without("norm_topk_prob"))
    assert not read_model_spec(tmp_path).gate.norm_topk_prob


def test_yarn_is_read(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    write_json(tmp_path / "config.json", hub_spelling(QWEN3_CONFIG) | {"rope_scaling": scaling})
    rope = attention(tmp_path).rope
    assert rope.yarn == YarnSpec(4.0, 32768, 32.0, 1.0, None, None)
    assert rope.theta == 1000000.0
    assert not rope.interleaved


def test_what_later_configs_say_of_features_that_all_have_is_taken(tmp_path: Path) -> None:
    plain = read_model_spec(write_config(tmp_path))
    noisy = write_config(
        tmp_path, use_qk_norm=True, qkv_bias=False, shared_expert_intermediate_size=0
    )
    assert read_model_spec(noisy) == plain


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "qwen2_moe"),
        ("use_sliding_window", True),
        ("use_qk_norm", False),
        ("qkv_bias", True),
        ("shared_expert_intermediate_size", 128),
        ("n_shared_experts", 1),
        ("scoring_func", "sigmoid"),
        ("routed_scaling_factor", 2.5),
        ("routed_scaling_factor", 1.0),
        ("n_group", 2),
        ("topk_method", "noaux_tc"),
        ("moe_router_bias", True),
        ("norm_topk_prob", None),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", None),
        ("num_key_value_heads", 0),
        ("head_dim", 15),
        ("head_dim", 0),
        ("head_dim", "24"),
        ("num_attention_heads", 0),
        ("attention_bias", "no"),
        ("norm_topk_prob", 1),
        ("num_experts", 8),
        ("num_local_experts", 0),
        ("num_experts_per_tok", 17),
        ("decoder_sparse_step", 0),
        ("decoder_sparse_step", 3),
        ("decoder_sparse_step", None),
        ("mlp_only_layers", [0, 1]),
        ("mlp_only_layers", [2]),
        ("mlp_only_layers", ["0"]),
        ("mlp_only_layers", 1),
        ("rope_scaling", {"type": "dynamic", "factor": 4}),
        ("rope_scaling", {"type": "yarn", "factor": 4, "attention_factor": 1.1}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ],
)
def test_what_is_not_computed_is_refused_by_file_key_and_value(
    tmp_path: Path, key: str, value: Any
) -> None:
    write_config(tmp_path, **{key: value})
    with pytest.raises(CheckpointError, match="supported") as refusal:
        read_model_spec(tmp_path)
    assert str(tmp_path / "config.json") in str(refusal.value)
    assert key in str(refusal.value)


def test_a_derived_head_size_must_be_even(tmp_path: Path) -> None:
    write_config(tmp_path, head_dim=None, hidden_size=60)
    with pytest.raises(CheckpointError, match=r"head_dim = null; .* 60 / 4 is none"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    "key", ["num_local_experts", "num_key_value_heads", "moe_intermediate_size", "architectures"]
)
def test_missing_keys_are_named(tmp_path: Path, key: str) -> None:
    write_json(tmp_path / "config.json", without(key))
    expected = "num_experts" if key == "num_local_experts" else key
    with pytest.raises(CheckpointError, match=f"{expected} is missing"):
        read_model_spec(tmp_path)
