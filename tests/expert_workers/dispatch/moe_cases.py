"""Builders for dispatch tests: seeded tokens and routes, and one whole MoE layer over a dispatcher."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.placement import ExpertPlacement
from expert_workers.dispatch.base import DispatchedTokens, Dispatcher
from tests.reference.dense_moe import DenseExperts, dense_moe, make_experts

HIDDEN = 16
NUM_EXPERTS = 8
EXPERTS_PER_TOK = 3
EXPERTS = make_experts(NUM_EXPERTS, HIDDEN, intermediate=12, seed=11)


@dataclass(frozen=True)
class Tokens:
    """x: [T, H]; topk_ids: [T, K] int64 sorted; topk_weights: [T, K] float32; positions: [T] int64."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    positions: Tensor


def make_tokens(
    num_tokens: int,
    *,
    seed: int,
    experts: range = range(NUM_EXPERTS),
    experts_per_tok: int = EXPERTS_PER_TOK,
    dtype: torch.dtype = torch.float32,
) -> Tokens:
    """Tokens whose experts are drawn from `experts`."""
    generator = np.random.default_rng(seed)
    ids = np.array(
        [
            np.sort(generator.choice(experts, experts_per_tok, replace=False))
            for _ in range(num_tokens)
        ],
        dtype=np.int64,
    ).reshape(num_tokens, experts_per_tok)
    weights = generator.random((num_tokens, experts_per_tok), dtype=np.float32)
    x = generator.standard_normal((num_tokens, HIDDEN), dtype=np.float32)
    return Tokens(
        torch.from_numpy(x).to(dtype),
        torch.from_numpy(ids),
        torch.from_numpy(weights),
        torch.arange(num_tokens),
    )


def local_experts(placement: ExpertPlacement, rank: int) -> DenseExperts:
    return EXPERTS.select(placement.local_experts(rank).tolist())


def dispatch(dispatcher: Dispatcher, tokens: Tokens) -> DispatchedTokens:
    return dispatcher.dispatch(tokens.x, tokens.topk_ids, tokens.topk_weights, tokens.positions)


def moe_layer(dispatcher: Dispatcher, experts: DenseExperts, tokens: Tokens) -> Tensor:
    """Dispatch, the rank's experts one row after the other, combine. [T, H] of the tokens' dtype."""
    received = dispatch(dispatcher, tokens)
    y = dense_moe(experts, received.x, received.expert_ids, received.expert_weights)
    return dispatcher.combine(y.to(tokens.x.dtype), received.handle)


def expected(tokens: Tokens) -> Tensor:
    """[T, H] float32 of the oracle that knows all experts."""
    return dense_moe(EXPERTS, tokens.x, tokens.topk_ids, tokens.topk_weights)
