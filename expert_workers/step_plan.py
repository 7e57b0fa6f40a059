"""A step's plan on one rank: the parts of its fragments joined, all layers at once, before layer 0. Numpy only.

Nothing is sorted: every part is in order already, so each entry's place is a sum of counts before it.

Letters: L MoE layers, W ranks, E local experts, F fragments of the step (by source rank, then in the source's order).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.dispatch_plan import ReceivePart, SendPart

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PlacedSend:
    """A fragment of this rank's own tokens; its token 0 is the rank's replayed token number `first_token`."""

    part: SendPart
    first_token: int


@dataclass(frozen=True)
class PlacedReceive:
    """What one fragment brings here."""

    part: ReceivePart
    source: int


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One MoE layer.

    send_tokens:    [n] int64 numbers of this rank's replayed tokens, by destination, ascending within one
    send_counts, recv_counts: [W] rows per peer, this rank included
    pair_rows:      [p] int64, received row of each pair; by local expert, ascending within one
    pair_ranks:     [p] int64, number of the pair among its row's
    pair_weights:   [p] float32
    pair_counts:    [E] int64
    num_rank_pairs: pairs of two ranks with rows, in the whole group
    """

    send_tokens: Int64Array
    send_counts: Int64Array
    recv_counts: Int64Array
    pair_rows: Int64Array
    pair_ranks: Int64Array
    pair_weights: npt.NDArray[np.float32]
    pair_counts: Int64Array
    num_rank_pairs: int


def join_parts(
    sends: Sequence[PlacedSend],
    receives: Sequence[PlacedReceive],
    *,
    num_layers: int,
    num_experts: int,
    ep_size: int,
) -> list[LayerPlan]:
    """One LayerPlan per MoE layer. `receives` are ordered by source; both may be empty."""
    sent = _join_sends(sends, num_layers, ep_size)
    received = _join_receives(receives, num_layers, num_experts, ep_size)
    num_rank_pairs = _count_rank_pairs(receives, num_layers, ep_size)
    return [
        LayerPlan(
            send_tokens=sent.entries[sent.begins[layer] : sent.begins[layer + 1]],
            send_counts=sent.counts[layer],
            recv_counts=received.row_counts[layer],
            pair_rows=received.rows[received.begins[layer] : received.begins[layer + 1]],
            pair_ranks=received.ranks[received.begins[layer] : received.begins[layer + 1]],
            pair_weights=received.weights[received.begins[layer] : received.begins[layer + 1]],
            pair_counts=received.pair_counts[layer],
            num_rank_pairs=num_rank_pairs[layer],
        )
        for layer in range(num_layers)
    ]


@dataclass(frozen=True, eq=False)
class _Sent:
    entries: Int64Array
    begins: Int64Array
    counts: Int64Array


@dataclass(frozen=True, eq=False)
class _Received:
    row_counts: Int64Array
    rows: Int64Array
    ranks: Int64Array
    weights: npt.NDArray[np.float32]
    pair_counts: Int64Array
    begins: Int64Array


def _join_sends(sends: Sequence[PlacedSend], num_layers: int, ep_size: int) -> _Sent:
    counts = _stacked([send.part.counts for send in sends], (num_layers, ep_size))  # [F, L, W]
    places = _places(counts)
    entries = np.empty(len(places), np.int64)
    entries[places] = _concatenated(
        [send.part.tokens.astype(np.int64) + send.first_token for send in sends]
    )
    total = counts.sum(axis=0)
    return _Sent(entries, _begins(total), total)


def _join_receives(
    receives: Sequence[PlacedReceive], num_layers: int, num_experts: int, ep_size: int
) -> _Received:
    num_rows = _stacked([r.part.num_rows for r in receives], (num_layers,))  # [F, L]
    first_rows = num_rows.cumsum(axis=0) - num_rows
    counts = _stacked([r.part.pair_counts for r in receives], (num_layers, num_experts))
    places = _places(counts)
    rows = np.empty(len(places), np.int64)
    ranks = np.empty(len(places), np.int64)
    weights = np.empty(len(places), np.float32)
    shifts = np.repeat(first_rows.ravel(), counts.sum(axis=2).ravel())
    rows[places] = _concatenated([r.part.pair_rows for r in receives]) + shifts
    ranks[places] = _concatenated([r.part.pair_ranks for r in receives])
    if receives:
        weights[places] = np.concatenate([r.part.pair_weights for r in receives])
    row_counts = np.zeros((num_layers, ep_size), np.int64)
    np.add.at(row_counts.T, [r.source for r in receives], num_rows)
    total = counts.sum(axis=0)
    return _Received(row_counts, rows, ranks, weights, total, _begins(total))


def _count_rank_pairs(
    receives: Sequence[PlacedReceive], num_layers: int, ep_size: int
) -> list[int]:
    """By layer."""
    has_rows = np.zeros((ep_size, num_layers, ep_size), np.uint8)  # from source to destination
    for receive in receives:
        has_rows[receive.source] |= np.unpackbits(receive.part.destinations, axis=1, count=ep_size)
    has_rows[range(ep_size), :, range(ep_size)] = 0
    counts: list[int] = has_rows.sum(axis=(0, 2), dtype=np.int64).tolist()
    return counts


def _places(counts: Int64Array) -> Int64Array:
    """counts: [F, L, G] entries of each fragment in each layer and group, stored fragment by fragment, layer by layer,
    group by group. Returns the place of each stored entry when they stand layer by layer, group by group, fragment by
    fragment."""
    by_group = np.moveaxis(counts, 0, -1)  # [L, G, F]
    starts = by_group.ravel().cumsum() - by_group.ravel()
    starts = np.moveaxis(starts.reshape(by_group.shape), -1, 0).ravel()  # [F * L * G]
    lengths = counts.ravel()
    stored_starts = lengths.cumsum() - lengths
    places: Int64Array = np.repeat(starts - stored_starts, lengths) + np.arange(lengths.sum())
    return places


def _begins(total: Int64Array) -> Int64Array:
    """total: [L, G]. Where each layer's entries begin, and where all end: [L + 1]."""
    return np.concatenate(([0], total.sum(axis=1).cumsum()))


def _stacked(arrays: Sequence[npt.NDArray[np.signedinteger]], shape: tuple[int, ...]) -> Int64Array:
    """[F, *shape] int64, also of none."""
    return np.array(arrays, np.int64).reshape(len(arrays), *shape)


def _concatenated(arrays: Sequence[npt.NDArray[np.integer]]) -> Int64Array:
    return np.concatenate([np.zeros(0, np.int64), *arrays]).astype(np.int64, copy=False)
