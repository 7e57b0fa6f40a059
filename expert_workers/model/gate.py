"""Gates: scores of all experts, which of them a token visits, and with what weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.model_spec import SigmoidGateSpec, SoftmaxGateSpec
from expert_workers.model.numerics import Numerics
from expert_workers.model.weights import GateWeights


@dataclass(frozen=True)
class GateChoice:
    """Letters: T tokens, K experts per token.

    topk_ids:     [T, K] int64, distinct and ascending within a token
    topk_weights: [T, K] float32, as applied
    poisoned:     [T] bool, tokens with a router logit that is not finite; their routes are valid and mean nothing
    """

    topk_ids: Tensor
    topk_weights: Tensor
    poisoned: Tensor


class SigmoidGate:
    """DeepSeek-V3 (`noaux_tc`): sigmoid scores, a bias for selection only, top-k within the best groups."""

    def __init__(self, spec: SigmoidGateSpec, weights: GateWeights, numerics: Numerics) -> None:
        self._spec = spec
        self._weights = weights
        self._numerics = numerics

    def __call__(self, x: Tensor) -> GateChoice:
        """x: [T, H]."""
        router_logits, poisoned = _router_logits(x, self._weights, self._numerics)
        scores = self._numerics.sigmoid(router_logits)
        bias = self._weights.score_correction_bias
        topk_ids = self._select(scores if bias is None else scores + bias)
        return GateChoice(topk_ids, self._weigh(scores.gather(1, topk_ids)), poisoned)

    def _select(self, selection_scores: Tensor) -> Tensor:
        """selection_scores: [T, experts]. Returns [T, K] ascending ids, all from the `topk_group` best groups.

        Dropped groups are masked with −∞, not 0: a bias below −1 would otherwise let them win.
        """
        spec = self._spec
        group_size = spec.num_experts // spec.num_groups
        grouped = selection_scores.view(-1, spec.num_groups, group_size)
        group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = group_scores.topk(spec.topk_group, dim=-1, sorted=False).indices
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
        masked = grouped.masked_fill(dropped[:, :, None], float("-inf")).flatten(1)
        return _best(masked, spec.num_experts_per_tok)

    def _weigh(self, topk_scores: Tensor) -> Tensor:
        """topk_scores: [T, K], without the bias."""
        if self._spec.norm_topk_prob:
            topk_scores = topk_scores / (topk_scores.sum(dim=-1, keepdim=True) + 1e-20)
        return topk_scores * self._spec.routed_scaling_factor


class SoftmaxGate:
    """Qwen3-MoE: shares of a softmax over all experts in float32; router logits and weights in the model's dtype."""

    def __init__(self, spec: SoftmaxGateSpec, weights: GateWeights, numerics: Numerics) -> None:
        self._spec = spec
        self._weights = weights
        self._numerics = numerics

    def __call__(self, x: Tensor) -> GateChoice:
        """x: [T, H]."""
        router_logits, poisoned = _router_logits(x, self._weights, self._numerics)
        shares = self._numerics.softmax(router_logits.to(x.dtype).to(torch.float32))
        topk_ids = _best(shares, self._spec.num_experts_per_tok)
        topk_shares = shares.gather(1, topk_ids)
        if self._spec.norm_topk_prob:
            topk_shares = topk_shares / topk_shares.sum(dim=-1, keepdim=True)
        return GateChoice(topk_ids, topk_shares.to(x.dtype).to(torch.float32), poisoned)


Gate = SigmoidGate | SoftmaxGate


def _router_logits(x: Tensor, weights: GateWeights, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """x: [T, H]. Returns [T, experts] float32, zero where poisoned, and [T] bool: rows that are not finite."""
    router_logits = numerics.linear(x.to(torch.float32), weights.weight)
    poisoned = ~torch.isfinite(router_logits).all(dim=-1)
    return router_logits.masked_fill(poisoned[:, None], 0.0), poisoned


def _best(selection_scores: Tensor, num_experts_per_tok: int) -> Tensor:
    """selection_scores: [T, experts]. Returns [T, K] ids, ascending."""
    topk_ids = selection_scores.topk(num_experts_per_tok, dim=-1, sorted=False).indices
    return topk_ids.sort(dim=-1).values
