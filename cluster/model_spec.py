"""What a model is, read from a Hugging Face config.json: attention, MoE layers, gate kind, sizes. No weights here."""

from dataclasses import dataclass
from typing import Literal

from cluster.routes import RouteShape

ComputeDtype = Literal["float32", "bfloat16"]


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
