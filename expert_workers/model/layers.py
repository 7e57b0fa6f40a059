"""Small pieces that several layers share: rotary table and rotation, the dense MLP."""

import torch
from torch import Tensor

from expert_workers.model.numerics import Numerics
from expert_workers.model.weights import MlpWeights


class RotaryTable:
    """cos and sin of every position, computed once: their bits must not depend on what a step holds.

    cos, sin: [max positions, dim / 2] float32
    """

    def __init__(self, *, dim: int, theta: float, max_positions: int, device: torch.device) -> None:
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        frequencies = 1.0 / (theta**steps)
        positions = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles = positions[:, None] * frequencies
        self.cos = angles.cos()
        self.sin = angles.sin()

    def at(self, positions: Tensor, dtype: torch.dtype) -> "Rotation":
        """positions: [T] int64."""
        cos = self.cos.index_select(0, positions).to(dtype)
        sin = self.sin.index_select(0, positions).to(dtype)
        return Rotation(cos, sin)


class Rotation:
    """The rotation of one step's tokens. cos, sin: [T, dim / 2]."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._cos = cos
        self._sin = sin

    def apply(self, x: Tensor, *, interleaved: bool) -> Tensor:
        """x: [T, heads, dim]. Pairs are (x0, x1), (x2, x3), … when interleaved, else (x0, x dim/2), …

        Returns [T, heads, dim], the first members of the pairs before the second ones either way.
        """
        cos, sin = self._cos[:, None], self._sin[:, None]
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DenseMlp:
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, weights: MlpWeights, numerics: Numerics) -> None:
        self._weights = weights
        self._numerics = numerics

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, H]. Returns [T, H]."""
        gate, up = self._numerics.linear(x, self._weights.gate_up).chunk(2, dim=-1)
        return self._numerics.linear(self._numerics.silu(gate) * up, self._weights.down)
