"""Twin of `run_experts`: every row through each of its local experts, one product at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from expert_workers.dispatch.base import DispatchedTokens
from expert_workers.model.weights import ExpertWeights


def loop_experts(tokens: DispatchedTokens, weights: ExpertWeights) -> Tensor:
    """[R, H]: per row the weighted sum in ascending local expert order."""
    y = torch.zeros(tokens.x.shape, dtype=torch.float32)
    for row, (ids, applied) in enumerate(
        zip(tokens.expert_ids.tolist(), tokens.expert_weights.tolist(), strict=True)
    ):
        for expert, weight in sorted(zip(ids, applied, strict=True)):
            if expert >= 0:
                gate, up = F.linear(tokens.x[row], weights.gate_up[expert]).chunk(2)
                y[row] += weight * F.linear(F.silu(gate) * up, weights.down[expert])
    return y.to(tokens.x.dtype)
