"""Where the sequences of a trainer's batch lie among its tokens, and which of these tokens have routes.

Letters: B rows, S columns of a batch, N = B·S tokens row by row, R of them with routes, L MoE layers, K experts per
token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.errors import RouteReplayError
from expert_workers.route_replay.ranged_routes import RangedRoutes


@dataclass(frozen=True)
class BatchLayout:
    """num_tokens: N; sequences: of each the places of its tokens among the N, padding left out, in order."""

    num_tokens: int
    sequences: tuple[range, ...]

    def __post_init__(self) -> None:
        end = 0
        for sequence in self.sequences:
            if sequence.step != 1 or not end <= sequence.start <= sequence.stop <= self.num_tokens:
                raise RouteReplayError(
                    f"sequence at {sequence} of {self.num_tokens} tokens; supported: runs side by "
                    f"side or apart, in order"
                )
            end = sequence.stop

    @staticmethod
    def padded(attention_mask: Tensor) -> "BatchLayout":
        """One sequence per row, padded on either side.

        attention_mask: [B, S], 1 or True for tokens, 0 for padding. Raises RouteReplayError for another shape, and for
        a row whose tokens are not side by side.
        """
        if attention_mask.ndim != 2:
            raise RouteReplayError(
                f"attention_mask of shape {list(attention_mask.shape)}; supported: [rows, columns]"
            )
        mask = (attention_mask.detach() != 0).cpu().numpy()
        width = mask.shape[1]
        runs = [_run_of(row, number) for number, row in enumerate(mask)]
        return BatchLayout(
            mask.size,
            tuple(
                range(number * width + run.start, number * width + run.stop)
                for number, run in enumerate(runs)
            ),
        )

    @staticmethod
    def packed(lengths: Sequence[int], num_tokens: int | None = None) -> "BatchLayout":
        """Sequences one after the other in one row, as with `position_ids` that begin again at 0.

        num_tokens: of the row, where padding follows. Raises RouteReplayError when they do not fit.
        """
        ends = np.cumsum([0, *lengths]).tolist()
        num_tokens = ends[-1] if num_tokens is None else num_tokens
        if any(length < 0 for length in lengths) or ends[-1] > num_tokens:
            raise RouteReplayError(
                f"sequences of {list(lengths)} tokens do not fit a row of {num_tokens}"
            )
        return BatchLayout(num_tokens, tuple(range(start, end) for start, end in pairwise(ends)))


@dataclass(frozen=True, eq=False)
class BatchRoutes:
    """places: [R] int64, rising; topk_ids: [R, L, K] integers; topk_weights: [R, L, K] float32 or None."""

    num_tokens: int
    places: npt.NDArray[np.int64]
    topk_ids: npt.NDArray[np.integer]
    topk_weights: npt.NDArray[np.float32] | None

    def ids_of_layer(self, moe_layer: int) -> Tensor:
        """[R, K] int64."""
        return torch.from_numpy(self.topk_ids[:, moe_layer].astype(np.int64))

    def weights_of_layer(self, moe_layer: int) -> Tensor:
        """[R, K] float32. Only of a batch with weights."""
        assert self.topk_weights is not None, "checked before the replay"
        return torch.from_numpy(np.ascontiguousarray(self.topk_weights[:, moe_layer]))


def place(layout: BatchLayout, routes: Sequence[RangedRoutes | None]) -> BatchRoutes:
    """Routes of a batch's tokens, from those of its sequences (None: this one has none).

    Raises RouteReplayError for another number of sequences, a range that ends beyond its sequence, sequences whose
    routes differ in layers or experts per token or of which only some have weights, and a batch without any.
    """
    if len(routes) != len(layout.sequences):
        raise RouteReplayError(
            f"routes of {len(routes)} sequences for a batch of {len(layout.sequences)}"
        )
    places = [
        _places(number, one, where)
        for number, (one, where) in enumerate(zip(routes, layout.sequences, strict=True))
        if one is not None
    ]
    present = [one for one in routes if one is not None]
    if not sum(len(part) for part in places):
        raise RouteReplayError("no token of the batch has routes: run it without a replay")
    shapes = {one.topk_ids.shape[1:] for one in present}
    if len(shapes) > 1:
        raise RouteReplayError(
            f"sequences with routes of {sorted(shapes)} (MoE layers, experts per token) in one batch"
        )
    weights = [one.topk_weights for one in present if one.topk_weights is not None]
    if weights and len(weights) < len(present):
        raise RouteReplayError(
            f"weights for {len(weights)} of {len(present)} sequences; supported: all or none"
        )
    return BatchRoutes(
        layout.num_tokens,
        np.concatenate(places),
        np.concatenate([one.topk_ids for one in present]),
        np.concatenate(weights) if weights else None,
    )


def _places(number: int, routes: RangedRoutes, sequence: range) -> npt.NDArray[np.int64]:
    if routes.end > len(sequence):
        raise RouteReplayError(
            f"sequence {number}: routes of positions [{routes.start}, {routes.end}) in a sequence "
            f"of {len(sequence)} tokens"
        )
    first = sequence.start
    return np.arange(first + routes.start, first + routes.end, dtype=np.int64)


def _run_of(row: npt.NDArray[np.bool_], number: int) -> range:
    """Columns of a row's tokens."""
    columns = np.flatnonzero(row)
    if not len(columns):
        return range(0)
    run = range(int(columns[0]), int(columns[-1]) + 1)
    if len(run) != len(columns):
        raise RouteReplayError(
            f"attention_mask: row {number} has padding between tokens; supported: padding on "
            f"either side, or BatchLayout.packed for several sequences in a row"
        )
    return run
