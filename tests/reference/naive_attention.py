"""Attention of one query over the rows that it sees, as in the textbook, in float64."""

import torch
from torch import Tensor


def naive_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """query: [w], already scaled; keys: [n, w], all of them visible; values: [n, v]. Returns [v] float64."""
    shares = torch.softmax(keys.to(torch.float64) @ query.to(torch.float64), dim=0)
    return shares @ values.to(torch.float64)


def naive_mla(
    queries: Tensor, latents: Tensor, rotary_keys: Tensor, kv_b: Tensor, nope: int
) -> Tensor:
    """Attention in the expanded form: keys and values of every head rebuilt from the latents, causal, in float64.

    queries: [T, Hd, nope + rope], scaled and rotated; latents: [T, r]; rotary_keys: [T, rope], rotated;
    kv_b: [Hd, nope + v, r]. Returns [T, Hd, v].
    """
    queries, latents, rotary_keys, kv_b = (
        tensor.to(torch.float64) for tensor in (queries, latents, rotary_keys, kv_b)
    )
    expanded = torch.einsum("hdr,tr->htd", kv_b, latents)
    keys = torch.cat([expanded[..., :nope], rotary_keys.expand(kv_b.shape[0], -1, -1)], dim=-1)
    scores = torch.einsum("thd,hsd->hts", queries, keys)
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    shares = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return torch.einsum("hts,hsv->thv", shares, expanded[..., nope:])
