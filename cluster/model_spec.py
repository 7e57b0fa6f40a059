"""What a model is: attention, gate, which layers have experts, sizes. No weights here; `model_config` reads it."""

from dataclasses import dataclass
from typing import Literal

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
class RopeSpec:
    """Rotary position embedding of `dim` numbers per head."""

    dim: int
    theta: float
    interleaved: bool
    """Pairs are neighbours; otherwise the first half pairs with the second."""
    yarn: YarnSpec | None
    """None: plain rotary frequencies."""


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2/V3). The KV pool keeps [kv_lora_rank + qk_rope_head_dim] per token."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    rope: RopeSpec
    attention_bias: bool

    @property
    def qk_rope_head_dim(self) -> int:
        return self.rope.dim

    @property
    def kv_width(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class GqaSpec:
    """Grouped-query attention with a norm on every head of queries and keys (Qwen3).

    The KV pool keeps the keys of all KV heads, then their values: [2 · num_kv_heads · head_dim] per token.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    attention_bias: bool

    @property
    def kv_width(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim


AttentionSpec = MlaSpec | GqaSpec


@dataclass(frozen=True)
class SigmoidGateSpec:
    """Sigmoid gate with group-limited top-k and a score-correction bias (DeepSeek-V3 `noaux_tc`)."""

    num_experts: int
    num_experts_per_tok: int
    num_groups: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


@dataclass(frozen=True)
class SoftmaxGateSpec:
    """Softmax over all experts, then top-k, with or without renormalisation (Mixtral, Qwen)."""

    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool


GateSpec = SigmoidGateSpec | SoftmaxGateSpec


@dataclass(frozen=True)
class ModelSpec:
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    moe_layers: tuple[int, ...]
    """Numbers of the layers with experts, ascending; the others are dense."""
    intermediate_size: int
    moe_intermediate_size: int
    num_shared_experts: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    checkpoint_dtype: ComputeDtype
    """What `dtype = auto` computes in where the device can: bfloat16 stays, float16 is widened to float32."""
    attention: AttentionSpec
    gate: GateSpec
    config_eos_token_ids: tuple[int, ...]
    """Of config.json; empty if it names none."""
    generation_eos_token_ids: tuple[int, ...] | None
    """Of generation_config.json, where they are more than those of config.json for many models. None: it names none."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends an answer: generation_config.json decides, where it says something."""
        if self.generation_eos_token_ids is None:
            return self.config_eos_token_ids
        return self.generation_eos_token_ids

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def route_shape(self) -> RouteShape:
        """Routes of this model. Weights are kept in float32, which holds what the model applies, narrower or not."""
        return RouteShape(self.num_moe_layers, self.gate.num_experts_per_tok, self.gate.num_experts)

    def kv_bytes_per_token(self, dtype: ComputeDtype) -> int:
        return self.num_layers * self.attention.kv_width * (4 if dtype == "float32" else 2)
