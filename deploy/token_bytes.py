"""What one token takes in the prefix store, part by part, and how much of its KV that is. Pure."""

from dataclasses import dataclass

from cluster.model_spec import ComputeDtype, ModelSpec, SigmoidGateSpec
from cluster.scores import SCORE_BYTES


@dataclass(frozen=True)
class TokenBytes:
    """Bytes per token with KV in `dtype`.

    routes:         as they are stored, weights in float32
    applied_routes: if the weights were stored in `applied_dtype`, the one in which the model applies them
    """

    dtype: ComputeDtype
    kv: int
    routes: int
    applied_dtype: ComputeDtype
    applied_routes: int
    scores: int

    def share_of_kv(self, num_bytes: int) -> float:
        return num_bytes / self.kv


def token_bytes(spec: ModelSpec, dtype: ComputeDtype) -> TokenBytes:
    shape = spec.route_shape
    applied_dtype = _applied_dtype(spec, dtype)
    num_choices = shape.num_moe_layers * shape.num_experts_per_tok
    weight_bytes = 4 if applied_dtype == "float32" else 2
    return TokenBytes(
        dtype=dtype,
        kv=spec.kv_bytes_per_token(dtype),
        routes=shape.bytes_per_token,
        applied_dtype=applied_dtype,
        applied_routes=num_choices * (shape.id_dtype.itemsize + weight_bytes),
        scores=SCORE_BYTES,
    )


def _applied_dtype(spec: ModelSpec, dtype: ComputeDtype) -> ComputeDtype:
    """DeepSeek-V3 weighs experts in float32 whatever it computes in, Qwen3-MoE in the dtype of the hidden states."""
    return "float32" if isinstance(spec.gate, SigmoidGateSpec) else dtype
