"""How the formula's products and curves are evaluated: fast, or with a result that no neighbour can change.

Letters: T rows, Hd heads, E experts, B sequences, t tokens per sequence, S KV rows per sequence (a multiple of
KV_TILE), w KV width, r value width.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.errors import ConfigError

KV_TILE = 64
"""KV rows of a sequence are read in multiples of this, from position 0."""


class Numerics(Protocol):
    """Everything in the model whose bits could depend on how many rows are computed together."""

    @property
    def min_group_rows(self) -> int:
        """Rows that a non-empty group of `grouped_linear` must have at least."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [T, in]; weight: [out, in]; bias: [out]. Returns [T, out]."""
        ...

    def grouped_linear(self, x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
        """x: [T, in] sorted by group; weight: [E, out, in]; group_ends: [E] int32, cumulative. Returns [T, out]."""
        ...

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: [T, Hd, in]; weight: [Hd, in, out]. Returns [T, Hd, out]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [T, n]; weight: [n]. In float32, then x's dtype, then times the weight (as transformers does)."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """x · sigmoid(x), elementwise."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor:
        """Elementwise."""
        ...

    def attend(self, queries: Tensor, kv: Tensor, masked: Tensor, value_width: int) -> Tensor:
        """Multi-query attention: every head reads the same rows, whose first `value_width` columns are the values.

        queries: [B, t, Hd, w], already scaled; kv: [B, S, w], finite where masked too; masked: [B, t, 1, S] bool.
        Each query sees at least one row. Returns [B, t, Hd, value_width].
        """
        ...


class FastNumerics:
    """The shortest way that torch offers."""

    min_group_rows = 1

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def grouped_linear(self, x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
        return grouped_linear(x, weight, group_ends)

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(x, weight, eps)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def attend(self, queries: Tensor, kv: Tensor, masked: Tensor, value_width: int) -> Tensor:
        num_seqs, num_tokens, num_heads, _ = queries.shape
        rows = queries.reshape(num_seqs, num_tokens * num_heads, -1)
        scores = torch.bmm(rows, kv.transpose(1, 2)).view(num_seqs, num_tokens, num_heads, -1)
        scores = scores.masked_fill_(masked, float("-inf"))
        shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(kv.dtype)
        values = torch.bmm(shares.view(num_seqs, num_tokens * num_heads, -1), kv[..., :value_width])
        return values.view(num_seqs, num_tokens, num_heads, value_width)


class DeterministicNumerics:
    """Each row's result is the same to the byte whatever the number of rows, its place among them and their values.

    Float32 on CPU with one thread. What it rests on was measured with MKL: the rows of a product are bit-identical
    for any row count ≥ 4 and differ at 1 to 3, unless fewer than 16 columns come out of a row whose length is no
    multiple of 4; `torch.bmm` takes another kernel below 400 multiplications per matrix; sums, means, maxima and exp
    of a row do not depend on other rows, while `F.silu` and `torch.sigmoid` do (their vectorised body and scalar
    tail round differently). `tests/expert_workers/model/test_numerics.py` holds all of it.
    """

    def __init__(self) -> None:
        """Raises ConfigError when torch may use more than one thread: the split of a product follows its size."""
        if torch.get_num_threads() != 1:
            raise ConfigError(
                f"deterministic numerics need one torch thread, got {torch.get_num_threads()}: "
                "call torch.set_num_threads(1) or set OMP_NUM_THREADS=1"
            )

    min_group_rows = 4

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, weight = _pad_odd_columns(_pad_rows(x, self.min_group_rows), weight)
        product = F.linear(rows, weight)[: x.shape[0]]
        return product if bias is None else product + bias

    def grouped_linear(self, x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
        return grouped_linear(*_pad_odd_columns(x, weight), group_ends)

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        work_per_row = weight.shape[1] * weight.shape[2]
        min_rows = max(self.min_group_rows, -(-_SMALL_BMM // work_per_row))
        rows = _pad_rows(x, min_rows).transpose(0, 1).contiguous()
        rows, transposed = _pad_odd_columns(rows, weight.transpose(1, 2))
        return torch.bmm(rows, transposed.transpose(1, 2)).transpose(0, 1)[: x.shape[0]]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(x, weight, eps)

    def silu(self, x: Tensor) -> Tensor:
        return x / (1.0 + torch.exp(-x))

    def sigmoid(self, x: Tensor) -> Tensor:
        return 1.0 / (1.0 + torch.exp(-x))

    def attend(self, queries: Tensor, kv: Tensor, masked: Tensor, value_width: int) -> Tensor:
        """Tiles of KV_TILE rows at absolute positions, each a product of its own, summed in order of position.

        The maximum over all tiles is exact, so no tile is rescaled. A tile that a query does not see adds exact
        zeros, which is why a sequence may be padded to its neighbours' length; the last `+ 0.0` makes −0 into 0.
        """
        num_seqs, num_tokens, num_heads, width = queries.shape
        num_tiles = kv.shape[1] // KV_TILE
        queries = F.pad(queries, (0, 0, 0, max(0, self.min_group_rows - num_heads)))
        padded_heads = queries.shape[2]
        rows = queries.reshape(num_seqs, 1, num_tokens * padded_heads, width)
        rows = rows.expand(-1, num_tiles, -1, -1).reshape(num_seqs * num_tiles, -1, width)
        tiles = kv.reshape(num_seqs * num_tiles, KV_TILE, width)
        tiled = (num_seqs, num_tiles, num_tokens, padded_heads)

        scores = torch.bmm(rows, tiles.transpose(1, 2)).view(*tiled, KV_TILE)
        masked = masked.view(num_seqs, num_tokens, 1, num_tiles, KV_TILE).permute(0, 3, 1, 2, 4)
        scores = scores.masked_fill_(masked, float("-inf"))
        largest = scores.amax(dim=(1, 4), keepdim=True)
        shares = scores.sub_(largest).exp_()
        products = torch.bmm(shares.view(rows.shape[0], -1, KV_TILE), tiles[..., :value_width])
        values = _sum_in_order(products.view(*tiled, value_width))
        total = _sum_in_order(shares.sum(dim=-1, keepdim=True))
        return (values / total + 0.0)[:, :, :num_heads]


_SMALL_BMM = 400
"""Below this many multiplications per matrix `torch.bmm` on CPU leaves MKL for a loop of its own."""


def grouped_linear(x: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    """One product per group. x: [T, in]; weight: [E, out, in]; group_ends: [E] int32. Returns [T, out]."""
    if _grouped_mm_takes(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=group_ends)
    product = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(
        group_ends.tolist()
    ):  # host sync: only where no grouped kernel exists
        if end > start:
            product[start:end] = F.linear(x[start:end], weight[expert])
        start = end
    return product


def _grouped_mm_takes(x: Tensor, weight: Tensor) -> bool:
    """`grouped_mm` wants rows on 16-byte borders, and on CUDA bfloat16."""
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    return aligned and (x.dtype == torch.bfloat16 or not x.is_cuda)


def _pad_rows(x: Tensor, min_rows: int) -> Tensor:
    """x: [T, ...]. Returns x with zero rows appended up to `min_rows`."""
    missing = min_rows - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing > 0 else x


def _pad_odd_columns(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x: [..., in]; weight: [..., out, in]. Appends zero columns to both where MKL's few-column kernel would serve."""
    missing = -x.shape[-1] % 4
    if missing == 0 or weight.shape[-2] >= 16:
        return x, weight
    return F.pad(x, (0, missing)), F.pad(weight, (0, missing))


def _sum_in_order(parts: Tensor) -> Tensor:
    """parts: [B, n, ...]. Returns [B, ...], the n parts added from the first to the last."""
    total = parts[:, 0]
    for index in range(1, parts.shape[1]):
        total = total + parts[:, index]
    return total


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
