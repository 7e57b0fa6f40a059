"""Routes of a part of one sequence, as the API returns them and as a trainer takes them.

Letters: T tokens, L MoE layers, K experts per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.errors import RouteReplayError
from cluster.npy import decode_npy, encode_npy


@dataclass(frozen=True, eq=False)
class RangedRoutes:
    """Routes of the tokens at positions [start, start + T) of a sequence.

    topk_ids:     [T, L, K] of an integer dtype, logical expert ids, ascending and distinct within a token and layer
    topk_weights: [T, L, K] float32 as the model applied them, or None where only ids are known

    Raises RouteReplayError for arrays that are not that.
    """

    topk_ids: npt.NDArray[np.integer]
    topk_weights: npt.NDArray[np.float32] | None = None
    start: int = 0

    def __post_init__(self) -> None:
        _check_ids(self.topk_ids)
        if self.start < 0:
            raise RouteReplayError(f"routes start at position {self.start}; supported: 0 or above")
        if self.topk_weights is not None:
            _check_weights(self.topk_weights, self.topk_ids.shape)

    @property
    def num_tokens(self) -> int:
        return int(self.topk_ids.shape[0])

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def followed_by(self, later: "RangedRoutes") -> "RangedRoutes":
        """One run of both, as a prompt's and its completion's. An empty one counts as absent.

        Raises RouteReplayError when `later` does not start where this ends, or only one has weights.
        """
        if self.num_tokens == 0:
            return later
        if later.num_tokens == 0:
            return self
        if later.start != self.end:
            raise RouteReplayError(
                f"routes of positions [{self.start}, {self.end}) cannot be followed by those of "
                f"[{later.start}, {later.end}): supported are ranges without a gap"
            )
        if self.topk_ids.shape[1:] != later.topk_ids.shape[1:]:
            raise RouteReplayError(
                f"routes of {self.topk_ids.shape[1:]} (MoE layers, experts per token) cannot be "
                f"followed by those of {later.topk_ids.shape[1:]}"
            )
        ids = np.concatenate([self.topk_ids, later.topk_ids])
        return RangedRoutes(ids, _joined_weights(self, later), self.start)


def routes_of_choice(answer: Mapping[str, Any], index: int = 0) -> RangedRoutes:
    """Routes of one choice of an answer of `/v1/completions` or `/v1/chat/completions`, or of a stream's last chunk.

    answer: the JSON object; its prompt's routes come first where they stand beside several choices
    index:  of the choice, prompt-major where the request had several prompts

    Raises RouteReplayError naming the field that is missing or is not what the API returns.
    """
    choices = answer.get("choices", [])
    choice = next((choice for choice in choices if choice.get("index") == index), None)
    if choice is None:
        raise RouteReplayError(
            f"choice {index}: not in the answer, which has "
            f"{[choice.get('index') for choice in choices]}"
        )
    routes = decode_routes(choice)
    if "prompt_routed_experts" not in answer:
        return routes
    return _of_prompt(answer, index).followed_by(routes)


def decode_routes(fields: Mapping[str, Any], prefix: str = "") -> RangedRoutes:
    """What `routed_experts`, `routed_weights` (where there are) and `routed_range` say, the names after `prefix`.

    Raises RouteReplayError naming the field.
    """
    ids = _array(fields, f"{prefix}routed_experts")
    weights_name, range_name = f"{prefix}routed_weights", f"{prefix}routed_range"
    weights = _array(fields, weights_name) if fields.get(weights_name) is not None else None
    routed_range = fields.get(range_name)
    match routed_range:
        case [int(start), int(end)] if 0 <= start <= end:
            pass
        case _:
            raise RouteReplayError(f"{range_name}: {routed_range!r}; supported: [start, end)")
    try:
        routes = RangedRoutes(ids, weights, start)
    except RouteReplayError as error:
        raise RouteReplayError(f"{prefix}routed_experts: {error}") from error
    if routes.end != end:
        raise RouteReplayError(
            f"{range_name}: {routed_range!r} for the routes of {routes.num_tokens} tokens"
        )
    return routes


def encode_routes(routes: RangedRoutes) -> dict[str, Any]:
    """The same three fields, for whoever stores or sends routes as JSON."""
    fields: dict[str, Any] = {
        "routed_experts": encode_npy(routes.topk_ids),
        "routed_range": [routes.start, routes.end],
    }
    if routes.topk_weights is not None:
        fields["routed_weights"] = encode_npy(routes.topk_weights)
    return fields


def _of_prompt(answer: Mapping[str, Any], index: int) -> RangedRoutes:
    if isinstance(answer["prompt_routed_experts"], str):
        return decode_routes(answer, "prompt_")
    num_prompts = len(answer["prompt_routed_experts"])
    num_choices = len(answer["choices"]) // num_prompts
    names = (name for name in answer if name.startswith("prompt_routed_"))
    return decode_routes({name: answer[name][index // num_choices] for name in names}, "prompt_")


def _array(fields: Mapping[str, Any], name: str) -> np.ndarray:
    text = fields.get(name)
    if not isinstance(text, str):
        raise RouteReplayError(
            f"{name}: {'missing' if text is None else type(text).__name__}; supported: base64 of a "
            f".npy file, as a request with return_routed_experts is answered"
        )
    try:
        return decode_npy(text)
    except ValueError as error:
        raise RouteReplayError(f"{name}: {error}") from error


def _check_ids(ids: np.ndarray) -> None:
    if ids.ndim != 3 or 0 in ids.shape[1:]:
        raise RouteReplayError(
            f"expert ids of shape {ids.shape}; supported: [tokens, MoE layers, experts per token]"
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise RouteReplayError(f"expert ids of dtype {ids.dtype}; supported: integers")
    if ids.size and int(ids.min()) < 0:
        raise RouteReplayError(f"expert id {int(ids.min())}; supported: 0 or above")
    unsorted = (ids[..., 1:] <= ids[..., :-1]).any(axis=-1)
    if unsorted.any():
        token, layer = (int(n) for n in np.argwhere(unsorted)[0])
        raise RouteReplayError(
            f"expert ids {ids[token, layer].tolist()} of token {token} in MoE layer {layer}; "
            f"supported: distinct ids in ascending order"
        )


def _check_weights(weights: np.ndarray, shape: tuple[int, ...]) -> None:
    if weights.shape != shape:
        raise RouteReplayError(f"weights of shape {weights.shape} for expert ids of shape {shape}")
    if weights.dtype != np.float32:
        raise RouteReplayError(f"weights of dtype {weights.dtype}; supported: float32")
    if not np.isfinite(weights).all():
        raise RouteReplayError("weights that are not finite")


def _joined_weights(first: RangedRoutes, later: RangedRoutes) -> npt.NDArray[np.float32] | None:
    if first.topk_weights is None and later.topk_weights is None:
        return None
    if first.topk_weights is None or later.topk_weights is None:
        raise RouteReplayError("routes with weights and routes without cannot be joined")
    return np.concatenate([first.topk_weights, later.topk_weights])
