"""Expert routes in a JSON answer: base64 of a .npy file, so that `numpy.load` reads dtype and shape; not made here."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.messages import RoutePart
from cluster.npy import NpyText


@dataclass(frozen=True)
class RouteSelection:
    """Which routes a request asked for. `end` None: to the last token that was an input."""

    weights: bool
    start: int
    end: int | None


@dataclass(frozen=True)
class EncodedRoutes:
    """Arrays of [end − start, MoE layers, experts per token]; `weights` is None unless asked for."""

    topk_ids: NpyText
    topk_weights: NpyText | None
    start: int
    end: int


def encode_routes(
    parts: Sequence[RoutePart], selection: RouteSelection, within: range
) -> EncodedRoutes:
    """The selected part of the routes of a request.

    parts: one after the other, at least one, from selection.start to the end of the selection or of `within` or beyond.
    within: positions that were an input and belong here; a selection that reaches beyond is cut there.
    """
    asked_end = within.stop if selection.end is None else selection.end
    end = max(within.start, min(asked_end, within.stop))
    start = min(max(selection.start, within.start), end)
    picked = [_between(part, start, end) for part in parts]
    weights = [part.topk_weights for part in picked if part.topk_weights is not None]
    return EncodedRoutes(
        topk_ids=NpyText([part.topk_ids for part in picked]),
        topk_weights=NpyText(weights) if selection.weights else None,
        start=start,
        end=end,
    )


def _between(part: RoutePart, start: int, end: int) -> RoutePart:
    """Of its positions those in [start, end), as views."""
    kept = slice(max(0, start - part.start), max(0, end - part.start))
    weights = None if part.topk_weights is None else part.topk_weights[kept]
    return RoutePart(part.start + kept.start, part.topk_ids[kept], weights)
