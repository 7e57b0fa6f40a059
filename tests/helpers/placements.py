"""Placements that no cell has by default."""

import numpy as np

from cluster.placement import ExpertPlacement


def redundant_placement(num_experts: int, ep_size: int, seed: int) -> ExpertPlacement:
    """In random order, about every fourth expert with one further copy and some with two, on whatever ranks."""
    rng = np.random.default_rng(seed)
    num_copies = -(-num_experts // 4 // ep_size) * ep_size + (-num_experts) % ep_size
    copies = rng.integers(0, num_experts, num_copies)
    physical = rng.permutation(np.concatenate([np.arange(num_experts), copies]))
    return ExpertPlacement(0, ep_size, num_experts, physical.astype(np.int32))
