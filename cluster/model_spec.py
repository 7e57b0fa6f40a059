"""What a model is, read from a Hugging Face config.json: attention, MoE layers, gate kind, sizes. No weights here.

Two spellings are read: the Hub's (rope_theta, torch_dtype, n_routed_experts) and transformers 5's (rope_parameters,
dtype, num_local_experts). Whatever would change the maths and is not computed here is refused by name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.errors import CheckpointError
from cluster.routes import RouteShape

ComputeDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class YarnSpec:
    """YaRN (arXiv 2309.00071): rotary frequencies stretched from the pretrained context to a longer one."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2/V3). The KV pool keeps [kv_lora_rank + qk_rope_head_dim] per token."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    rope_interleave: bool
    attention_bias: bool
    yarn: YarnSpec | None
    """None: plain rotary frequencies."""

    @property
    def kv_width(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class GateSpec:
    """Sigmoid gate with group-limited top-k and a score-correction bias (DeepSeek-V3 `noaux_tc`)."""

    num_experts: int
    num_experts_per_tok: int
    num_groups: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


@dataclass(frozen=True)
class ModelSpec:
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_dense_layers: int
    """The first layers, without experts (`first_k_dense_replace`)."""
    intermediate_size: int
    moe_intermediate_size: int
    num_shared_experts: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    checkpoint_dtype: ComputeDtype
    """What `dtype = auto` computes in where the device can: bfloat16 stays, float16 is widened to float32."""
    attention: MlaSpec
    gate: GateSpec
    eos_token_ids: tuple[int, ...]

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def route_shape(self) -> RouteShape:
        """Routes of this model; weights are applied in float32 (DeepSeek-V3)."""
        return RouteShape(self.num_moe_layers, self.gate.num_experts_per_tok, self.gate.num_experts)

    def kv_bytes_per_token(self, dtype: ComputeDtype) -> int:
        return self.num_layers * self.attention.kv_width * (4 if dtype == "float32" else 2)


def read_model_spec(model_dir: Path) -> ModelSpec:
    """The model in `model_dir`, from its config.json and, if present, generation_config.json (end-of-sequence ids).

    Raises CheckpointError naming the file, the key, its value and what is supported.
    """
    config = _JsonObject.read(model_dir / "config.json")
    _check_family(config)
    _check_switches(config)
    spec = _read_deepseek_v3(config, model_dir)
    _check_unread_keys(config)
    return spec


SUPPORTED_ARCHITECTURE = "DeepseekV3ForCausalLM"

_SWITCHES: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "quantization_config": None,
}
"""Keys of which one value can be computed; a missing key means that value."""

_INERT_KEYS = """
    attention_dropout aux_loss_alpha auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    decoder_start_token_id do_sample early_stopping ep_size finetuning_task forced_bos_token_id forced_eos_token_id
    id2label initializer_range is_decoder label2id length_penalty max_length min_length num_beams num_mtp_layers
    num_nextn_predict_layers num_return_sequences output_attentions output_hidden_states output_router_logits
    pad_token_id prefix pretraining_tp problem_type repetition_penalty return_dict return_dict_in_generate
    router_aux_loss_coef sep_token_id seq_aux task_specific_params temperature tf_legacy_loss tokenizer_class top_k
    top_p torchscript transformers_version typical_p use_cache
"""
"""Training, generation defaults and book-keeping: nothing in them reaches the forward pass."""


class _JsonObject:
    """A parsed JSON object with typed access. Every refusal names the file, the key and the value.

    Owner of the set of keys that were read, so that what nobody read can be refused.
    """

    def __init__(self, file: Path, values: dict[str, Any]) -> None:
        self.file = file
        self.values = values
        self.keys_read: set[str] = set()

    @staticmethod
    def read(file: Path) -> "_JsonObject":
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{file}: not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{file}: must hold a JSON object, got {type(values).__name__}")
        return _JsonObject(file, values)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return self.values.get(key, default)

    def refuse(self, key: str, supported: str) -> CheckpointError:
        if key not in self.values:
            return CheckpointError(f"{self.file}: {key} is missing; supported: {supported}")
        found = json.dumps(self.values[key])
        shown = found if len(found) <= 200 else found[:200] + " …"
        return CheckpointError(f"{self.file}: {key} = {shown}; supported: {supported}")

    def integer(self, key: str, *, low: int = 1) -> int:
        value = self.get(key)
        if type(value) is not int or value < low:
            raise self.refuse(key, f"an integer ≥ {low}")
        return value

    def integer_or_null(self, key: str, *, low: int = 1) -> int | None:
        """The key must be there: its absence means different things to different readers."""
        if key in self.values and self.get(key) is None:
            return None
        return self.integer(key, low=low)

    def number(self, key: str, *, default: float) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.refuse(key, "a positive number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.refuse(key, "true or false")
        return value

    def spelling(self, first: str, second: str) -> str:
        """The key that is present. Both may be, when they say the same."""
        present = [key for key in (first, second) if key in self.values]
        if len(present) == 2 and self.get(first) != self.get(second):
            raise self.refuse(first, f"the same value as {second} = {self.values[second]!r}")
        return present[0] if present else first


def _check_family(config: _JsonObject) -> None:
    if config.get("architectures") != [SUPPORTED_ARCHITECTURE]:
        raise config.refuse("architectures", f'["{SUPPORTED_ARCHITECTURE}"]')
    if config.get("model_type", "deepseek_v3") != "deepseek_v3":
        raise config.refuse("model_type", '"deepseek_v3"')


def _check_switches(config: _JsonObject) -> None:
    for key, supported in _SWITCHES.items():
        value = config.get(key, supported)
        if type(value) is not type(supported) or value != supported:
            raise config.refuse(key, json.dumps(supported))


def _check_unread_keys(config: _JsonObject) -> None:
    """Refuses keys that nobody here knows, unless they are off (null, false, 0, empty) or private."""
    known = config.keys_read.union(_INERT_KEYS.split())
    for key, value in config.values.items():
        if key not in known and not key.startswith("_") and value:
            advice = "no value of this unknown key; remove it if it does not change the computation"
            raise config.refuse(key, advice)


def _read_deepseek_v3(config: _JsonObject, model_dir: Path) -> ModelSpec:
    num_layers = config.integer("num_hidden_layers")
    vocab_size = config.integer("vocab_size")
    return ModelSpec(
        architecture=SUPPORTED_ARCHITECTURE,
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        num_layers=num_layers,
        num_dense_layers=_read_num_dense_layers(config, num_layers),
        intermediate_size=config.integer("intermediate_size"),
        moe_intermediate_size=config.integer("moe_intermediate_size"),
        num_shared_experts=config.integer_or_null("n_shared_experts", low=0) or 0,
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6),
        max_position_embeddings=config.integer("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
        checkpoint_dtype=_read_dtype(config),
        attention=_read_attention(config),
        gate=_read_gate(config),
        eos_token_ids=_read_eos_token_ids(config, model_dir, vocab_size),
    )


def _read_num_dense_layers(config: _JsonObject, num_layers: int) -> int:
    num_dense_layers = config.integer("first_k_dense_replace", low=0)
    if num_dense_layers >= num_layers:
        raise config.refuse("first_k_dense_replace", f"less than num_hidden_layers = {num_layers}")
    return num_dense_layers


def _read_dtype(config: _JsonObject) -> ComputeDtype:
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


def _read_attention(config: _JsonObject) -> MlaSpec:
    num_heads = config.integer("num_attention_heads")
    nope, rope = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    if rope % 2:
        raise config.refuse("qk_rope_head_dim", "an even number")
    implied = {"num_key_value_heads": num_heads, "qk_head_dim": nope + rope, "head_dim": rope}
    for key, value in implied.items():
        if config.get(key) not in (None, value):
            raise config.refuse(key, f"{value}, which the other sizes imply")
    rope_theta, yarn = _read_rope(config)
    return MlaSpec(
        num_heads=num_heads,
        q_lora_rank=config.integer_or_null("q_lora_rank"),
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=config.integer("v_head_dim"),
        rope_theta=rope_theta,
        rope_interleave=config.flag("rope_interleave", default=True),
        attention_bias=config.flag("attention_bias", default=False),
        yarn=yarn,
    )


def _read_rope(config: _JsonObject) -> tuple[float, YarnSpec | None]:
    """Base and scaling of the rotary frequencies. The Hub's `rope_scaling` and `rope_parameters` hold the same keys."""
    if config.get("rope_scaling") and config.get("rope_parameters"):
        config.spelling("rope_scaling", "rope_parameters")
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    values = config.get(key)
    if values is None:
        return config.number("rope_theta", default=10000.0), None
    rope_type = _rope_type(values)
    if rope_type is None:
        raise config.refuse(key, 'an object of rope_type "default" or "yarn" with its usual keys')
    parameters = _JsonObject(config.file, values)
    rope_theta = config.number("rope_theta", default=10000.0)
    if "rope_theta" in values:
        rope_theta = parameters.number("rope_theta", default=10000.0)
        if config.number("rope_theta", default=rope_theta) != rope_theta:
            raise config.refuse("rope_theta", f"the value of {key}: {rope_theta}")
    return rope_theta, _read_yarn(parameters) if rope_type == "yarn" else None


_ROPE_KEYS = {
    "default": {"rope_type", "type", "rope_theta"},
    "yarn": {
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    },
}


def _rope_type(parameters: Any) -> str | None:
    """None when the type, or a key beside it, is not computed here."""
    if not isinstance(parameters, dict):
        return None
    named = [parameters[key] for key in ("rope_type", "type") if key in parameters] or ["default"]
    rope_type = named[0]
    if any(name != rope_type for name in named) or rope_type not in ("default", "yarn"):
        return None
    return rope_type if parameters.keys() <= _ROPE_KEYS[rope_type] else None


def _read_yarn(parameters: _JsonObject) -> YarnSpec:
    factor = parameters.number("factor", default=0.0)
    if factor < 1:
        raise parameters.refuse("factor", "a number ≥ 1")
    return YarnSpec(
        factor=factor,
        original_max_position_embeddings=parameters.integer("original_max_position_embeddings"),
        beta_fast=parameters.number("beta_fast", default=32.0),
        beta_slow=parameters.number("beta_slow", default=1.0),
        mscale=_number_or_none(parameters, "mscale"),
        mscale_all_dim=_number_or_none(parameters, "mscale_all_dim"),
    )


def _number_or_none(parameters: _JsonObject, key: str) -> float | None:
    """None for a missing key, null or 0: all three leave the magnitude to the factor alone."""
    return parameters.number(key, default=1.0) if parameters.get(key) else None


def _read_gate(config: _JsonObject) -> GateSpec:
    """Shapes that no group-limited top-k can serve are refused here, before any weight is read."""
    num_experts = config.integer(config.spelling("n_routed_experts", "num_local_experts"))
    num_groups, topk_group = config.integer("n_group"), config.integer("topk_group")
    num_experts_per_tok = config.integer("num_experts_per_tok")
    group_size, rest = divmod(num_experts, num_groups)
    if rest or group_size < 2:
        raise config.refuse(
            "n_group",
            f"a divisor of the {num_experts} routed experts that leaves at least 2 experts in a "
            "group (a group is scored by its best two)",
        )
    if topk_group > num_groups:
        raise config.refuse("topk_group", f"at most n_group = {num_groups}")
    if num_experts_per_tok > topk_group * group_size:
        kept = f"{topk_group * group_size} experts of the topk_group = {topk_group} kept groups"
        raise config.refuse("num_experts_per_tok", f"at most the {kept}")
    return GateSpec(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        num_groups=num_groups,
        topk_group=topk_group,
        norm_topk_prob=config.flag("norm_topk_prob", default=True),
        routed_scaling_factor=config.number("routed_scaling_factor", default=2.5),
    )


def _read_eos_token_ids(config: _JsonObject, model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    source = config
    value = config.get("eos_token_id")
    generation_file = model_dir / "generation_config.json"
    if generation_file.exists():
        generation = _JsonObject.read(generation_file)
        if generation.get("eos_token_id") is not None:
            source, value = generation, generation.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in ids):
        raise source.refuse("eos_token_id", f"ids below vocab_size = {vocab_size}")
    return tuple(ids)
