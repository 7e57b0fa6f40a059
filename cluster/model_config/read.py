"""From a Hugging Face config.json to a ModelSpec: the keys that all families share, and a table of families.

Two spellings are read: the Hub's (rope_theta, torch_dtype, n_routed_experts) and transformers 5's (rope_parameters,
dtype, num_local_experts). Whatever would change the maths and is not computed here is refused by name.
"""

import json
from pathlib import Path
from typing import Any

from cluster.model_config.deepseek_v3 import DEEPSEEK_V3
from cluster.model_config.family import MAX_LAYERS, Family
from cluster.model_config.json_object import JsonObject
from cluster.model_config.qwen3_moe import QWEN3_MOE
from cluster.model_spec import ComputeDtype, ModelSpec

FAMILIES = (DEEPSEEK_V3, QWEN3_MOE)

_INERT_KEYS = """
    attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    decoder_start_token_id do_sample early_stopping finetuning_task forced_bos_token_id forced_eos_token_id id2label
    initializer_range is_decoder label2id length_penalty max_length min_length num_beams num_return_sequences
    output_attentions output_hidden_states output_router_logits pad_token_id prefix pretraining_tp problem_type
    repetition_penalty return_dict return_dict_in_generate router_aux_loss_coef sep_token_id task_specific_params
    temperature tf_legacy_loss tokenizer_class top_k top_p torchscript transformers_version typical_p use_cache
"""
"""Training, generation defaults and book-keeping: nothing in them reaches the forward pass."""
_ADVICE = {
    "quantization_config": " (weights in bfloat16, float16 or float32: dequantise the checkpoint)"
}


def read_model_spec(model_dir: Path) -> ModelSpec:
    """The model in `model_dir`, from its config.json and, if present, generation_config.json (end-of-sequence ids).

    Raises CheckpointError naming the file, the key, its value and what is supported.
    """
    config = JsonObject.read(model_dir / "config.json")
    family = _family(config)
    _check_switches(config, family)
    spec = _read(config, family, model_dir)
    _check_unread_keys(config, family)
    return spec


def _family(config: JsonObject) -> Family:
    architectures = config.get("architectures")
    for family in FAMILIES:
        if architectures == [family.architecture]:
            if config.get("model_type", family.model_type) != family.model_type:
                raise config.refuse("model_type", f'"{family.model_type}"')
            return family
    raise config.refuse("architectures", " or ".join(f'["{f.architecture}"]' for f in FAMILIES))


def _check_switches(config: JsonObject, family: Family) -> None:
    for key, supported in family.switches.items():
        value = config.get(key, supported)
        if type(value) is not type(supported) or value != supported:
            raise config.refuse(key, json.dumps(supported) + _ADVICE.get(key, ""))


def _check_unread_keys(config: JsonObject, family: Family) -> None:
    """Refuses keys that nobody here knows, unless they are off (null, false, 0, empty) or private."""
    known = config.keys_read.union(_INERT_KEYS.split()) | family.inert_keys
    for key, value in config.values.items():
        if key not in known and not key.startswith("_") and value:
            advice = "no value of this unknown key; remove it if it does not change the computation"
            raise config.refuse(key, advice)


def _read(config: JsonObject, family: Family, model_dir: Path) -> ModelSpec:
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    vocab_size = config.integer("vocab_size")
    return ModelSpec(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        num_layers=num_layers,
        moe_layers=family.moe_layers(config, num_layers),
        intermediate_size=config.integer("intermediate_size"),
        moe_intermediate_size=config.integer("moe_intermediate_size"),
        num_shared_experts=family.num_shared_experts(config),
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6),
        max_position_embeddings=config.integer("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
        checkpoint_dtype=_read_dtype(config),
        attention=family.attention(config),
        gate=family.gate(config),
        config_eos_token_ids=_read_eos_token_ids(config, vocab_size) or (),
        generation_eos_token_ids=_read_generation_eos_token_ids(model_dir, vocab_size),
    )


def _read_dtype(config: JsonObject) -> ComputeDtype:
    key = config.spelling("dtype", "torch_dtype")
    dtypes: dict[Any, ComputeDtype] = {
        None: "float32",
        "float32": "float32",
        "float16": "float32",
        "bfloat16": "bfloat16",
    }
    value = config.get(key)
    if not isinstance(value, str | None) or value not in dtypes:
        raise config.refuse(key, '"float32", "bfloat16", "float16"')
    return dtypes[value]


def _read_generation_eos_token_ids(model_dir: Path, vocab_size: int) -> tuple[int, ...] | None:
    file = model_dir / "generation_config.json"
    return _read_eos_token_ids(JsonObject.read(file), vocab_size) if file.exists() else None


def _read_eos_token_ids(source: JsonObject, vocab_size: int) -> tuple[int, ...] | None:
    value = source.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in ids):
        raise source.refuse("eos_token_id", f"ids below vocab_size = {vocab_size}")
    return tuple(ids)
