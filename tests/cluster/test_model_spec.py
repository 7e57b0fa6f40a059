from pathlib import Path
from typing import Any

import pytest

from cluster.errors import CheckpointError
from cluster.model_config.read import read_model_spec
from cluster.model_spec import YarnSpec
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR, TINY_CONFIG, hub_spelling, write_json


def write_config(model_dir: Path, **overrides: Any) -> Path:
    write_json(model_dir / "config.json", TINY_CONFIG | overrides)
    return model_dir


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in TINY_CONFIG.items() if name != key}


def test_demo_model_with_both_spellings_is_read() -> None:
    spec = read_model_spec(DEMO_MODEL_DIR)
    assert (spec.num_layers, spec.num_moe_layers, spec.gate.num_experts) == (5, 4, 64)
    assert spec.attention.kv_width == 80
    assert spec.attention.rope.theta == 10000.0
    assert spec.checkpoint_dtype == "bfloat16"
    assert spec.eos_token_ids == (2, 0)


def test_both_spellings_say_the_same(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", TINY_CONFIG)
    own = read_model_spec(tmp_path)
    write_json(tmp_path / "config.json", hub_spelling(TINY_CONFIG))
    assert read_model_spec(tmp_path) == own


def test_num_local_experts_is_another_name_of_n_routed_experts(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", without("n_routed_experts") | {"num_local_experts": 16})
    assert read_model_spec(tmp_path).gate.num_experts == 16


def test_null_query_rank_means_a_direct_projection(tmp_path: Path) -> None:
    assert read_model_spec(write_config(tmp_path, q_lora_rank=None)).attention.q_lora_rank is None


def test_null_shared_experts_are_none(tmp_path: Path) -> None:
    assert read_model_spec(write_config(tmp_path, n_shared_experts=None)).num_shared_experts == 0


def test_float16_checkpoints_compute_in_float32(tmp_path: Path) -> None:
    assert read_model_spec(write_config(tmp_path, dtype="float16")).checkpoint_dtype == "float32"


def test_route_shape_counts_moe_layers_only(tmp_path: Path) -> None:
    shape = read_model_spec(write_config(tmp_path)).route_shape
    assert (shape.num_moe_layers, shape.num_experts_per_tok, shape.num_experts) == (2, 4, 16)


def test_generation_config_decides_end_of_sequence(tmp_path: Path) -> None:
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [7, 8]})
    assert read_model_spec(write_config(tmp_path, eos_token_id=3)).eos_token_ids == (7, 8)


def test_generation_config_without_the_id_leaves_it_to_config(tmp_path: Path) -> None:
    write_json(tmp_path / "generation_config.json", {"do_sample": False})
    assert read_model_spec(write_config(tmp_path, eos_token_id=3)).eos_token_ids == (3,)


def test_training_keys_and_switched_off_unknown_keys_do_not_matter(tmp_path: Path) -> None:
    plain = read_model_spec(write_config(tmp_path))
    noisy = write_config(
        tmp_path, attention_dropout=0.3, use_something=False, _name_or_path="x", seq_aux=True
    )
    assert read_model_spec(noisy) == plain


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["MixtralForCausalLM"]),
        ("architectures", None),
        ("model_type", "deepseek_v2"),
        ("hidden_act", "gelu"),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("rope_scaling", {"type": "linear", "factor": 4}),
        ("rope_scaling", {"type": "default", "rope_type": "yarn"}),
        ("rope_scaling", {"type": "yarn", "factor": 40, "attention_factor": 1.1}),
        ("rope_parameters", {"rope_type": ["yarn"]}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("rope_parameters", [1]),
        ("rope_theta", 500.0),
        ("moe_layer_freq", 2),
        ("moe_layer_freq", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("use_qk_norm", True),
        ("attention_bias", None),
        ("norm_topk_prob", "yes"),
        ("norm_topk_prob", None),
        ("norm_topk_prob", 1),
        ("routed_scaling_factor", 0),
        ("routed_scaling_factor", None),
        ("moe_router_bias", True),
        ("norm_before_topk", "softmax"),
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("num_hidden_layers", 2.5),
        ("q_lora_rank", 0),
        ("rms_norm_eps", -1),
        ("routed_scaling_factor", float("nan")),
        ("dtype", "float8_e4m3fn"),
        ("dtype", ["float32"]),
        ("torch_dtype", "bfloat16"),
        ("num_local_experts", 8),
        ("num_key_value_heads", 2),
        ("head_dim", 64),
        ("qk_head_dim", 64),
        ("qk_rope_head_dim", 7),
        ("first_k_dense_replace", 3),
        ("eos_token_id", 3072),
        ("eos_token_id", "</s>"),
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


YARN = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}


def test_yarn_is_read_in_both_spellings(tmp_path: Path) -> None:
    write_config(tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **YARN})
    spec = read_model_spec(tmp_path)
    assert spec.attention.rope.yarn == YarnSpec(40.0, 4096, 32.0, 1.0, 1.0, None)
    hub = hub_spelling(TINY_CONFIG) | {"rope_scaling": {"type": "yarn", **YARN}}
    write_json(tmp_path / "config.json", hub)
    assert read_model_spec(tmp_path) == spec


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings"])
def test_yarn_names_what_it_misses(tmp_path: Path, key: str) -> None:
    parameters = {name: value for name, value in YARN.items() if name != key}
    write_config(tmp_path, rope_parameters={"rope_type": "yarn", **parameters})
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        read_model_spec(tmp_path)


def test_nested_rope_theta_must_be_a_number(tmp_path: Path) -> None:
    write_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": "many"})
    with pytest.raises(CheckpointError, match='rope_theta = "many"'):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("n_group", {"n_group": 3}),
        ("n_group", {"n_group": 16}),
        ("n_group", {"n_group": 32}),
        ("topk_group", {"topk_group": 5}),
        ("num_experts_per_tok", {"num_experts_per_tok": 9}),
        ("num_experts_per_tok", {"topk_group": 1, "num_experts_per_tok": 5}),
    ],
)
def test_impossible_expert_groups_are_refused(
    tmp_path: Path, key: str, overrides: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} = "):
        read_model_spec(write_config(tmp_path, **overrides))


@pytest.mark.parametrize("key", ["hidden_size", "n_routed_experts", "n_group", "q_lora_rank"])
def test_missing_sizes_are_named(tmp_path: Path, key: str) -> None:
    write_json(tmp_path / "config.json", without(key))
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe", b""])
def test_unreadable_config_is_one_clear_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_spec(tmp_path)


def test_missing_config_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        read_model_spec(tmp_path / "nowhere")
