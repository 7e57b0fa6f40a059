"""Expert routes in a JSON answer: base64 of a .npy file, so that `numpy.load` reads dtype and shape."""

from dataclasses import dataclass

import numpy as np

from cluster.npy import encode_npy


@dataclass(frozen=True)
class RouteSelection:
    """Which routes a request asked for. `end` None: to the last token that was an input."""

    weights: bool
    start: int
    end: int | None


@dataclass(frozen=True)
class EncodedRoutes:
    """base64 .npy of [end − start, MoE layers, experts per token]; `weights` is None unless asked for."""

    topk_ids: str
    topk_weights: str | None
    start: int
    end: int


def encode_routes(
    topk_ids: np.ndarray, topk_weights: np.ndarray, selection: RouteSelection, within: range
) -> EncodedRoutes:
    """The selected part of the routes of a request.

    topk_ids, topk_weights: [at least within.stop, L, K] uint8 or uint16, and float32, from position 0.
    within: positions that were an input and belong here; a selection that reaches beyond is cut there.
    """
    asked_end = within.stop if selection.end is None else selection.end
    end = max(within.start, min(asked_end, within.stop))
    start = min(max(selection.start, within.start), end)
    return EncodedRoutes(
        topk_ids=encode_npy(topk_ids[start:end]),
        topk_weights=encode_npy(topk_weights[start:end]) if selection.weights else None,
        start=start,
        end=end,
    )
