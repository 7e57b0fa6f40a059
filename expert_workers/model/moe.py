"""One MoE layer: routes from outside, rows to their experts and back, shared experts at home."""

import torch
from torch import Tensor

from expert_workers.dispatch.base import Dispatcher
from expert_workers.dispatch.planned import PlannedStep
from expert_workers.model.experts import apply_experts, run_experts
from expert_workers.model.gate import Gate
from expert_workers.model.layers import DenseMlp
from expert_workers.model.numerics import Numerics
from expert_workers.model.weights import MoeWeights
from expert_workers.route_recorder import StepRoutes
from expert_workers.stopwatch import Stopwatch


class MoeLayer:
    """moe_layer: this layer's number among the MoE layers, the index into routes."""

    def __init__(self, moe_layer: int, gate: Gate, weights: MoeWeights, numerics: Numerics) -> None:
        self._moe_layer = moe_layer
        self._gate = gate
        self._experts = weights.experts
        self._numerics = numerics
        shared = weights.shared_experts
        self._shared_experts = None if shared is None else DenseMlp(shared, numerics)

    def __call__(
        self,
        x: Tensor,
        step_routes: StepRoutes,
        dispatcher: Dispatcher,
        stopwatch: Stopwatch,
        planned: PlannedStep | None = None,
    ) -> Tensor:
        """x: [T, H], T may be 0; the planned tokens are the last ones. Returns [T, H]."""
        routed = self._routed(x, step_routes, dispatcher, stopwatch, planned)
        if self._shared_experts is None:
            return routed
        with stopwatch.measure("experts"):
            return routed + self._shared_experts(x)

    def _routed(
        self,
        x: Tensor,
        step_routes: StepRoutes,
        dispatcher: Dispatcher,
        stopwatch: Stopwatch,
        planned: PlannedStep | None,
    ) -> Tensor:
        if planned is None:
            return self._dynamic(x, step_routes, dispatcher, stopwatch)
        border = x.shape[0] - planned.num_tokens
        known = self._planned(x[border:], planned, stopwatch)
        if not planned.has_dynamic:
            return known
        return torch.cat([self._dynamic(x[:border], step_routes, dispatcher, stopwatch), known])

    def _dynamic(
        self, x: Tensor, step_routes: StepRoutes, dispatcher: Dispatcher, stopwatch: Stopwatch
    ) -> Tensor:
        topk_ids, topk_weights = step_routes.topk(self._moe_layer, x, self._gate)
        positions = step_routes.positions[: x.shape[0]]
        with stopwatch.measure("dispatch"):
            tokens = dispatcher.dispatch(x, topk_ids, topk_weights, positions)
        with stopwatch.measure("experts"):
            y = run_experts(tokens, self._experts, self._numerics)
        with stopwatch.measure("combine"):
            return dispatcher.combine(y, tokens.handle)

    def _planned(self, x: Tensor, planned: PlannedStep, stopwatch: Stopwatch) -> Tensor:
        layer = self._moe_layer
        with stopwatch.measure("dispatch"):
            received = planned.dispatch(layer, x)
        with stopwatch.measure("experts"):
            y = apply_experts(received, planned.layout(layer), self._experts, self._numerics)
        with stopwatch.measure("combine"):
            return planned.combine(layer, y)
