"""One MoE layer: routes from outside, rows to their experts and back, shared experts at home."""

from torch import Tensor

from expert_workers.dispatch.base import Dispatcher
from expert_workers.model.experts import run_experts
from expert_workers.model.gate import SigmoidGate
from expert_workers.model.layers import DenseMlp
from expert_workers.model.numerics import Numerics
from expert_workers.model.weights import MoeWeights
from expert_workers.route_recorder import StepRoutes
from expert_workers.stopwatch import Stopwatch


class MoeLayer:
    """moe_layer: this layer's number among the MoE layers, the index into routes."""

    def __init__(
        self, moe_layer: int, gate: SigmoidGate, weights: MoeWeights, numerics: Numerics
    ) -> None:
        self._moe_layer = moe_layer
        self._gate = gate
        self._experts = weights.experts
        self._numerics = numerics
        shared = weights.shared_experts
        self._shared_experts = None if shared is None else DenseMlp(shared, numerics)

    def __call__(
        self, x: Tensor, step_routes: StepRoutes, dispatcher: Dispatcher, stopwatch: Stopwatch
    ) -> Tensor:
        """x: [T, H], T may be 0. Returns [T, H]."""
        topk_ids, topk_weights = step_routes.topk(self._moe_layer, x, self._gate)
        with stopwatch.measure("dispatch"):
            tokens = dispatcher.dispatch(x, topk_ids, topk_weights)
        with stopwatch.measure("experts"):
            y = run_experts(tokens, self._experts, self._numerics)
        with stopwatch.measure("combine"):
            routed = dispatcher.combine(y, tokens.handle)
        if self._shared_experts is None:
            return routed
        with stopwatch.measure("experts"):
            return routed + self._shared_experts(x)
