"""How the formula's products and curves are evaluated: fast, or with a result that no neighbour can change.

Letters: T rows, Hd heads, Hk KV heads (Hd / Hk heads share one), E experts, B sequences, t tokens per sequence,
S KV rows per sequence (a multiple of KV_TILE), w key width, v value width.
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
        """x: [..., n]; weight: [n]. In float32, then x's dtype, then times the weight (as transformers does)."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """x · sigmoid(x), elementwise."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor:
        """Elementwise."""
        ...

    def softmax(self, x: Tensor) -> Tensor:
        """x: [T, n] float32, finite. Over the last dimension."""
        ...

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, masked: Tensor) -> Tensor:
        """Every head over the rows of its KV head; heads that share one stand together.

        queries: [B, t, Hd, w], already scaled; keys: [B, Hk, S, w]; values: [B, Hk, S, v], both finite where masked
        too; masked: [B, t, 1, S] bool. Each query sees at least one row. Returns [B, t, Hd, v].
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

    def softmax(self, x: Tensor) -> Tensor:
        return torch.softmax(x, dim=-1)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, masked: Tensor) -> Tensor:
        num_kv_heads = keys.shape[1]
        rows = _by_kv_head(queries, num_kv_heads)
        num_seqs, _, num_tokens, num_sharing, width = rows.shape
        scores = torch.bmm(
            rows.reshape(num_seqs * num_kv_heads, num_tokens * num_sharing, width),
            keys.flatten(0, 1).transpose(1, 2),
        )
        scores = scores.view(*rows.shape[:4], -1).masked_fill_(masked[:, None], float("-inf"))
        shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        attended = torch.bmm(
            shares.view(num_seqs * num_kv_heads, num_tokens * num_sharing, -1), values.flatten(0, 1)
        )
        return _by_token(attended.view(*rows.shape[:4], -1))


class DeterministicNumerics:
    """Each row's result is the same to the byte whatever the number of rows, its place among them and their values.

    Float32 on CPU with one thread. What it rests on was measured with MKL: the rows of a product are bit-identical
    for any row count ≥ 4 and differ at 1 to 3, unless fewer than 16 columns come out of a row whose length is no
    multiple of 4; `torch.bmm` takes another kernel below 400 multiplications per matrix, and one of its own for an odd
    last row where 6 or 10 columns come out; sums, means, maxima and exp of a row do not depend on other rows, while
    `F.silu` and `torch.sigmoid` do (their vectorised body and scalar tail round differently).
    `tests/expert_workers/model/test_numerics.py` holds all of it.
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
        size_out = weight.shape[2]
        weight = _pad_few_columns(weight)
        work_per_row = weight.shape[1] * weight.shape[2]
        min_rows = max(self.min_group_rows, -(-_SMALL_BMM // work_per_row))
        rows = _pad_rows(x, min_rows).transpose(0, 1).contiguous()
        rows, transposed = _pad_odd_columns(rows, weight.transpose(1, 2))
        product = torch.bmm(rows, transposed.transpose(1, 2)).transpose(0, 1)
        return product[: x.shape[0], :, :size_out]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(x, weight, eps)

    def silu(self, x: Tensor) -> Tensor:
        return x / (1.0 + torch.exp(-x))

    def sigmoid(self, x: Tensor) -> Tensor:
        return 1.0 / (1.0 + torch.exp(-x))

    def softmax(self, x: Tensor) -> Tensor:
        shares = torch.exp(x - x.amax(dim=-1, keepdim=True))
        return shares / shares.sum(dim=-1, keepdim=True)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, masked: Tensor) -> Tensor:
        """Tiles of KV_TILE rows at absolute positions, each a product of its own, summed in order of position.

        The maximum over all tiles is exact, so no tile is rescaled. A tile that a query does not see adds exact
        zeros, which is why a sequence may be padded to its neighbours' length; the last `+ 0.0` makes −0 into 0.
        """
        num_seqs, num_kv_heads, num_rows, width = keys.shape
        wanted, num_heads = queries.shape[1:3]
        missing = -(-self.min_group_rows * num_kv_heads // num_heads) - wanted
        if missing > 0:
            queries = F.pad(queries, (0, 0, 0, 0, 0, missing))
            masked = F.pad(masked, (0, 0, 0, 0, 0, missing))
        rows = _by_kv_head(queries, num_kv_heads)
        num_tokens, num_sharing = rows.shape[2:4]
        num_tiles, num_pairs = num_rows // KV_TILE, num_seqs * num_kv_heads
        tiled = (num_pairs, num_tiles, num_tokens, num_sharing)

        rows = rows.reshape(num_pairs, 1, num_tokens * num_sharing, width)
        rows = rows.expand(-1, num_tiles, -1, -1).flatten(0, 1)
        key_tiles = keys.reshape(num_pairs * num_tiles, KV_TILE, width)
        scores = torch.bmm(rows, key_tiles.transpose(1, 2))
        scores.view(num_seqs, num_kv_heads, *tiled[1:], KV_TILE).masked_fill_(
            _by_tile(masked), float("-inf")
        )
        scores = scores.view(*tiled, KV_TILE)
        shares = scores.sub_(scores.amax(dim=(1, 4), keepdim=True)).exp_()
        padded = _pad_few_columns(values)
        value_tiles = padded.reshape(num_pairs * num_tiles, KV_TILE, padded.shape[-1])
        products = torch.bmm(shares.view(*rows.shape[:2], KV_TILE), value_tiles)
        attended = _sum_in_order(products.view(*tiled, padded.shape[-1]))
        total = _sum_in_order(shares.sum(dim=-1, keepdim=True))
        attended = (attended / total + 0.0).view(num_seqs, num_kv_heads, *tiled[2:], -1)
        return _by_token(attended)[:, :wanted, :, : values.shape[-1]]


def _by_kv_head(queries: Tensor, num_kv_heads: int) -> Tensor:
    """queries: [B, t, Hd, w]. Returns a view [B, Hk, t, Hd / Hk, w]."""
    num_seqs, num_tokens, _, width = queries.shape
    return queries.view(num_seqs, num_tokens, num_kv_heads, -1, width).transpose(1, 2)


def _by_token(attended: Tensor) -> Tensor:
    """attended: [B, Hk, t, Hd / Hk, v]. Returns [B, t, Hd, v]."""
    return attended.transpose(1, 2).flatten(2, 3)


def _by_tile(masked: Tensor) -> Tensor:
    """masked: [B, t, 1, S]. Returns a view [B, 1, S / KV_TILE, t, 1, KV_TILE]."""
    num_seqs, num_tokens, _, _ = masked.shape
    tiles = masked.view(num_seqs, num_tokens, 1, -1, KV_TILE)
    return tiles.permute(0, 2, 3, 1, 4).unsqueeze(4)


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


def _pad_few_columns(weight: Tensor) -> Tensor:
    """weight: [..., in, out]. Appends zero columns where `torch.bmm` treats an odd last row in a way of its own."""
    missing = -weight.shape[-1] % 4
    return F.pad(weight, (0, missing)) if missing and weight.shape[-1] < 16 else weight


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
