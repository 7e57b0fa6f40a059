"""Multi-head latent attention (DeepSeek-V2) in its absorbed form: heads read the compressed rows themselves.

softmax(q_nope · W_UK · c + q_rope · k_rope) over latents c; the same sum of latents, times W_UV, is the head's value.
Always absorbed, so that a token's result does not depend on how its prompt was cut into chunks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.model_spec import MlaSpec
from expert_workers.kv_pool import KVPool
from expert_workers.model.attention import (
    AttentionPlan,
    KeysAndValues,
    KVSpan,
    attend,
    gather_rows,
)
from expert_workers.model.numerics import Numerics
from expert_workers.model.rotary import Rotation, softmax_scale
from expert_workers.model.weights import MlaWeights

LATENT_NORM_EPS = 1e-6
"""Of the norms inside the attention: a constant in transformers, not the model's `rms_norm_eps`."""


@dataclass(frozen=True)
class LatentRows:
    """Rows that all heads share, as keys whole; their first `value_width` columns are the values."""

    kv_pool: KVPool
    layer: int
    value_width: int

    def gather(self, span: KVSpan) -> KeysAndValues:
        rows = gather_rows(self.kv_pool, self.layer, span)[:, None]
        return KeysAndValues(rows, rows[..., : self.value_width])


class MlaAttention:
    """Letters: T tokens, H hidden, Hd heads, r latent width."""

    def __init__(self, spec: MlaSpec, weights: MlaWeights, numerics: Numerics) -> None:
        self._spec = spec
        self._weights = weights
        self._numerics = numerics
        self._scale = softmax_scale(spec)

    def __call__(self, x: Tensor, plan: AttentionPlan, kv_pool: KVPool, layer: int) -> Tensor:
        """x: [T, H]. Writes the KV of the tokens that have none yet, then attends. Returns [T, H]."""
        spec, weights, numerics = self._spec, self._weights, self._numerics
        written = plan.written
        kv_pool.write(layer, written.slots, self._latents(written.rows(x), written.rotation))
        queries = self._queries(x, plan.rotation)
        values = attend(plan, queries, LatentRows(kv_pool, layer, spec.kv_lora_rank), numerics)
        heads = numerics.per_head(values, weights.value_up)
        return numerics.linear(heads.flatten(1), weights.output, weights.output_bias)

    def _latents(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[T, r + rope]: what the KV pool keeps of a token."""
        spec, weights = self._spec, self._weights
        compressed = self._numerics.linear(x, weights.kv_a, weights.kv_a_bias)
        latent, rotary = torch.split(compressed, [spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        latent = self._numerics.rms_norm(latent, weights.kv_a_norm, LATENT_NORM_EPS)
        rotary = rotation.apply(rotary[:, None], interleaved=spec.rope.interleaved)[:, 0]
        return torch.cat([latent, rotary], dim=-1)

    def _queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[T, Hd, r + rope], scaled: queries in the space of the latents."""
        spec, weights, numerics = self._spec, self._weights, self._numerics
        if weights.q_a is not None and weights.q_a_norm is not None:
            low_rank = numerics.linear(x, weights.q_a, weights.q_a_bias)
            x = numerics.rms_norm(low_rank, weights.q_a_norm, LATENT_NORM_EPS)
        head_dims = [spec.qk_nope_head_dim, spec.qk_rope_head_dim]
        queries = numerics.linear(x, weights.q_b).view(-1, spec.num_heads, sum(head_dims))
        plain, rotary = torch.split(queries, head_dims, dim=-1)
        absorbed = numerics.per_head(plain, weights.key_up)
        rotary = rotation.apply(rotary, interleaved=spec.rope.interleaved)
        return torch.cat([absorbed, rotary], dim=-1).mul(self._scale)
