"""Gates in Python loops: one token at a time, sets and sorts, no masks."""

import math

from cluster.model_spec import SigmoidGateSpec, SoftmaxGateSpec


def plain_sigmoid_gate(
    spec: SigmoidGateSpec, router_logits: list[float], bias: list[float]
) -> tuple[list[int], list[float]]:
    """Ids in ascending order and applied weights of one token. router_logits, bias: one number per expert."""
    scores = [1.0 / (1.0 + math.exp(-logit)) for logit in router_logits]
    selection = [score + offset for score, offset in zip(scores, bias, strict=True)]
    size = spec.num_experts // spec.num_groups
    groups = [list(range(first, first + size)) for first in range(0, spec.num_experts, size)]
    groups.sort(key=lambda group: -sum(sorted(selection[e] for e in group)[-2:]))
    candidates = [expert for group in groups[: spec.topk_group] for expert in group]
    candidates.sort(key=lambda expert: -selection[expert])
    chosen = sorted(candidates[: spec.num_experts_per_tok])
    weights = [scores[expert] for expert in chosen]
    if spec.norm_topk_prob:
        weights = [weight / (sum(weights) + 1e-20) for weight in weights]
    return chosen, [weight * spec.routed_scaling_factor for weight in weights]


def plain_softmax_gate(
    spec: SoftmaxGateSpec, router_logits: list[float]
) -> tuple[list[int], list[float]]:
    """Ids in ascending order and applied weights of one token. router_logits: one number per expert."""
    powers = [math.exp(logit - max(router_logits)) for logit in router_logits]
    shares = [power / sum(powers) for power in powers]
    best = sorted(range(spec.num_experts), key=lambda expert: -shares[expert])
    chosen = sorted(best[: spec.num_experts_per_tok])
    weights = [shares[expert] for expert in chosen]
    if spec.norm_topk_prob:
        weights = [weight / sum(weights) for weight in weights]
    return chosen, weights
