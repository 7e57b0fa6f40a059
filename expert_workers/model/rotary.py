"""Rotary position embedding: frequencies, with YaRN where the model asks for it, and the rotation itself."""

import math

import torch
from torch import Tensor

from cluster.model_spec import MlaSpec, RopeSpec, YarnSpec


def rotary_frequencies(spec: RopeSpec) -> Tensor:
    """[dim / 2] float32."""
    dim = spec.dim
    wavelengths = spec.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if spec.yarn is None:
        return 1.0 / wavelengths
    kept = 1.0 - _ramp(spec.yarn, dim, spec.theta)
    return 1.0 / (spec.yarn.factor * wavelengths) * (1.0 - kept) + 1.0 / wavelengths * kept


def rotary_magnitude(yarn: YarnSpec | None) -> float:
    """What cos and sin are multiplied by."""
    if yarn is None:
        return 1.0
    if yarn.mscale is None or yarn.mscale_all_dim is None:
        return _mscale(yarn.factor, 1.0)
    return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)


def softmax_scale(spec: MlaSpec) -> float:
    """What the products of queries and keys are multiplied by (DeepSeek-V3 puts a part of YaRN's magnitude here)."""
    scale = float((spec.qk_nope_head_dim + spec.qk_rope_head_dim) ** -0.5)
    yarn = spec.rope.yarn
    if yarn is None or yarn.mscale_all_dim is None:
        return scale
    return scale * _mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _ramp(yarn: YarnSpec, dim: int, theta: float) -> Tensor:
    """[dim / 2]: 0 where a frequency stays, 1 where it is divided by the factor, linear between."""

    def turns_to_dimension(turns: float) -> float:
        context = yarn.original_max_position_embeddings
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turns_to_dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(turns_to_dimension(yarn.beta_slow)), dim - 1)
    width = high - low if high != low else 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


class RotaryTable:
    """cos and sin of every position, computed once: their bits must not depend on what a step holds.

    cos, sin: [max positions, dim / 2] float32
    """

    def __init__(self, frequencies: Tensor, magnitude: float, max_positions: int) -> None:
        """frequencies: [dim / 2] float32; magnitude: what cos and sin are multiplied by."""
        positions = torch.arange(max_positions, dtype=torch.float32, device=frequencies.device)
        angles = positions[:, None] * frequencies
        self.cos = angles.cos() * magnitude
        self.sin = angles.sin() * magnitude

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

    def select(self, tokens: Tensor) -> "Rotation":
        """Of some of the tokens: [n] int64."""
        return Rotation(self._cos.index_select(0, tokens), self._sin.index_select(0, tokens))

    def apply(self, x: Tensor, *, interleaved: bool) -> Tensor:
        """x: [T, heads, dim]. Pairs are (x0, x1), (x2, x3), … when interleaved, else (x0, x dim/2), …

        Returns [T, heads, dim], the first members of the pairs before the second ones either way.
        """
        cos, sin = self._cos[:, None], self._sin[:, None]
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
