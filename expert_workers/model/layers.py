"""The dense MLP, which dense layers and shared experts have in common."""

from torch import Tensor

from expert_workers.model.numerics import Numerics
from expert_workers.model.weights import MlpWeights


class DenseMlp:
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, weights: MlpWeights, numerics: Numerics) -> None:
        self._weights = weights
        self._numerics = numerics

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, H]. Returns [T, H]."""
        gate, up = self._numerics.linear(x, self._weights.gate_up).chunk(2, dim=-1)
        return self._numerics.linear(self._numerics.silu(gate) * up, self._weights.down)
