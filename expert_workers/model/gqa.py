"""Grouped-query attention (arXiv 2305.13245) with a norm on every head of queries and keys, as in Qwen3."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.model_spec import GqaSpec
from expert_workers.kv_pool import KVPool
from expert_workers.model.attention import (
    AttentionPlan,
    KeysAndValues,
    KVSpan,
    attend,
    gather_rows,
)
from expert_workers.model.numerics import Numerics
from expert_workers.model.rotary import Rotation
from expert_workers.model.weights import GqaWeights


@dataclass(frozen=True)
class HeadRows:
    """Rows of the keys of all KV heads, then their values."""

    kv_pool: KVPool
    layer: int
    num_kv_heads: int
    value_width: int

    def gather(self, span: KVSpan) -> KeysAndValues:
        rows = gather_rows(self.kv_pool, self.layer, span)
        heads = rows.view(*rows.shape[:2], 2, self.num_kv_heads, self.value_width)
        keys, values = heads.permute(2, 0, 3, 1, 4).contiguous()
        return KeysAndValues(keys, values)


class GqaAttention:
    """Letters: T tokens, H hidden, Hd heads, Hk KV heads, d head size."""

    def __init__(
        self, spec: GqaSpec, weights: GqaWeights, numerics: Numerics, norm_eps: float
    ) -> None:
        """norm_eps: of the norms of the heads."""
        self._spec = spec
        self._weights = weights
        self._numerics = numerics
        self._norm_eps = norm_eps
        self._scale = spec.head_dim**-0.5

    def __call__(self, x: Tensor, plan: AttentionPlan, kv_pool: KVPool, layer: int) -> Tensor:
        """x: [T, H]. Writes the KV of the tokens that have none yet, then attends. Returns [T, H]."""
        spec, weights, numerics = self._spec, self._weights, self._numerics
        written = plan.written
        rows = self._keys_and_values(written.rows(x), written.rotation)
        kv_pool.write(layer, written.slots, rows)
        queries = self._queries(x, plan.rotation)
        kv_rows = HeadRows(kv_pool, layer, spec.num_kv_heads, spec.head_dim)
        heads = attend(plan, queries, kv_rows, numerics)
        return numerics.linear(heads.flatten(1), weights.output, weights.output_bias)

    def _keys_and_values(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[T, 2 · Hk · d]: what the KV pool keeps of a token."""
        weights = self._weights
        rows = self._numerics.linear(x, weights.key_value, weights.key_value_bias)
        keys, values = rows.chunk(2, dim=-1)
        keys = self._normed(keys, weights.key_norm, rotation)
        return torch.cat([keys.flatten(1), values], dim=-1)

    def _queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[T, Hd, d], scaled."""
        weights = self._weights
        queries = self._numerics.linear(x, weights.query, weights.query_bias)
        return self._normed(queries, weights.query_norm, rotation).mul(self._scale)

    def _normed(self, rows: Tensor, norm: Tensor, rotation: Rotation) -> Tensor:
        """rows: [T, heads · d]. Returns [T, heads, d]: each head normed, then rotated."""
        head_dim = self._spec.head_dim
        heads = rows.reshape(rows.shape[0], rows.shape[1] // head_dim, head_dim)
        heads = self._numerics.rms_norm(heads, norm, self._norm_eps)
        return rotation.apply(heads, interleaved=self._spec.rope.interleaved)
