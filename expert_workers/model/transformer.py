"""The decoder: embedding, layers, norm, head. Routes, KV memory, exchange and clocks arrive as arguments.

Letters: T tokens of this rank, S tokens to sample, H hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model_spec import MlaSpec, ModelSpec, SigmoidGateSpec
from expert_workers.dispatch.base import Dispatcher
from expert_workers.dispatch.planned import PlannedStep
from expert_workers.kv_pool import KVPool
from expert_workers.model.attention import AttentionPlan
from expert_workers.model.gate import Gate, SigmoidGate, SoftmaxGate
from expert_workers.model.gqa import GqaAttention
from expert_workers.model.layers import DenseMlp
from expert_workers.model.mla import MlaAttention
from expert_workers.model.moe import MoeLayer
from expert_workers.model.numerics import Numerics
from expert_workers.model.rotary import RotaryTable, rotary_frequencies, rotary_magnitude
from expert_workers.model.weights import (
    AttentionWeights,
    GateWeights,
    GqaWeights,
    LayerWeights,
    MlaWeights,
    ModelWeights,
    MoeWeights,
)
from expert_workers.route_recorder import StepRoutes
from expert_workers.step_inputs import StepInputs
from expert_workers.stopwatch import Stopwatch


class Transformer:
    """Immutable: a forward pass changes the KV pool, the step's routes and nothing else."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, numerics: Numerics) -> None:
        self._spec = spec
        self._weights = weights
        self._numerics = numerics
        self._rotary = RotaryTable(
            rotary_frequencies(spec.attention.rope).to(weights.embedding.device),
            rotary_magnitude(spec.attention.rope.yarn),
            spec.max_position_embeddings,
        )
        self._layers = [
            DecoderLayer(spec, layer, layer_weights, numerics)
            for layer, layer_weights in enumerate(weights.layers)
        ]

    def forward(
        self,
        inputs: StepInputs,
        kv_pool: KVPool,
        step_routes: StepRoutes,
        dispatcher: Dispatcher,
        stopwatch: Stopwatch,
        planned: PlannedStep | None = None,
    ) -> Tensor:
        """Logits [S, V] float32 of `inputs.last_token_indices`; see `hidden`."""
        x = self.hidden(inputs, kv_pool, step_routes, dispatcher, stopwatch, planned)
        return self.logits(x.index_select(0, inputs.last_token_indices))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [S, H]. Returns [S, V] float32."""
        normed = self._numerics.rms_norm(hidden, self._weights.norm, self._spec.rms_norm_eps)
        return self._numerics.linear(normed, self._weights.head).to(torch.float32)

    @torch.inference_mode()
    def hidden(
        self,
        inputs: StepInputs,
        kv_pool: KVPool,
        step_routes: StepRoutes,
        dispatcher: Dispatcher,
        stopwatch: Stopwatch,
        planned: PlannedStep | None = None,
    ) -> Tensor:
        """The stream after the last layer, [T, H]. With T = 0 every exchange still takes place.

        planned: of the last tokens of the step, if every rank's plan names some; the others are dispatched by
        `dispatcher`.
        """
        x = F.embedding(inputs.input_ids, self._weights.embedding)
        rotation = self._rotary.at(inputs.positions, x.dtype)
        plan = AttentionPlan.of(inputs, rotation, kv_pool.block_size)
        for layer in self._layers:
            with stopwatch.measure("attention"):
                x = layer.attend(x, plan, kv_pool)
            x = layer.feed_forward(x, step_routes, dispatcher, stopwatch, planned)
        return x


class DecoderLayer:
    """Attention and feed-forward, each on the normed stream and added to it."""

    def __init__(
        self, spec: ModelSpec, layer: int, weights: LayerWeights, numerics: Numerics
    ) -> None:
        self._layer = layer
        self._eps = spec.rms_norm_eps
        self._weights = weights
        self._numerics = numerics
        self._attention = _attention(spec, weights.attention, numerics)
        feed_forward = weights.feed_forward
        self._feed_forward: DenseMlp | MoeLayer
        if isinstance(feed_forward, MoeWeights):
            gate = _gate(spec, feed_forward.gate, numerics)
            moe_layer = spec.moe_layers.index(layer)
            self._feed_forward = MoeLayer(moe_layer, gate, feed_forward, numerics)
        else:
            self._feed_forward = DenseMlp(feed_forward, numerics)

    def attend(self, x: Tensor, plan: AttentionPlan, kv_pool: KVPool) -> Tensor:
        """x: [T, H]. Returns [T, H]."""
        normed = self._numerics.rms_norm(x, self._weights.input_norm, self._eps)
        return x + self._attention(normed, plan, kv_pool, self._layer)

    def feed_forward(
        self,
        x: Tensor,
        step_routes: StepRoutes,
        dispatcher: Dispatcher,
        stopwatch: Stopwatch,
        planned: PlannedStep | None,
    ) -> Tensor:
        """x: [T, H]. Returns [T, H]."""
        normed = self._numerics.rms_norm(x, self._weights.post_attention_norm, self._eps)
        if isinstance(self._feed_forward, MoeLayer):
            return x + self._feed_forward(normed, step_routes, dispatcher, stopwatch, planned)
        return x + self._feed_forward(normed)


def _attention(
    spec: ModelSpec, weights: AttentionWeights, numerics: Numerics
) -> MlaAttention | GqaAttention:
    attention = spec.attention
    if isinstance(attention, MlaSpec):
        assert isinstance(weights, MlaWeights)
        return MlaAttention(attention, weights, numerics)
    assert isinstance(weights, GqaWeights)
    return GqaAttention(attention, weights, numerics, spec.rms_norm_eps)


def _gate(spec: ModelSpec, weights: GateWeights, numerics: Numerics) -> Gate:
    if isinstance(spec.gate, SigmoidGateSpec):
        return SigmoidGate(spec.gate, weights, numerics)
    return SoftmaxGate(spec.gate, weights, numerics)
