"""Plain oracle of one MoE layer's routed part: every token through its experts, one after the other, no grouping.

Letters: T tokens, H hidden size, I intermediate size, E experts, K experts per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DenseExperts:
    """gate, up: [E, I, H]; down: [E, H, I]."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def expert(self, expert_id: int, row: Tensor) -> Tensor:
        """row: [H]. The expert's gated MLP of one row, [H]."""
        gated = torch.nn.functional.silu(self.gate[expert_id] @ row)
        return self.down[expert_id] @ (gated * (self.up[expert_id] @ row))

    def select(self, expert_ids: list[int]) -> "DenseExperts":
        """The experts that one rank holds, by local index."""
        return DenseExperts(self.gate[expert_ids], self.up[expert_ids], self.down[expert_ids])


def make_experts(num_experts: int, hidden: int, intermediate: int, seed: int) -> DenseExperts:
    generator = torch.Generator().manual_seed(seed)

    def weights(rows: int, columns: int) -> Tensor:
        return torch.randn(num_experts, rows, columns, generator=generator) / columns**0.5

    return DenseExperts(
        weights(intermediate, hidden), weights(intermediate, hidden), weights(hidden, intermediate)
    )


def dense_moe(experts: DenseExperts, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """x: [T, H]; topk_ids: [T, K], −1 for no expert; topk_weights: [T, K]. Returns [T, H] float32."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for token, (ids, weights) in enumerate(
        zip(topk_ids.tolist(), topk_weights.tolist(), strict=True)
    ):
        for expert_id, weight in zip(ids, weights, strict=True):
            if expert_id >= 0:
                out[token] += weight * experts.expert(expert_id, x[token].float())
    return out
