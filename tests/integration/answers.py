"""What a client got for one completion that returns token ids, experts and weights; equal when all bytes are."""

import base64
import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.routes import ExpertRoutes

EVERYTHING: dict[str, Any] = {"return_token_ids": True, "return_routed_experts": "weights"}


@dataclass(frozen=True)
class Answer:
    """experts, weights: files in NumPy's format, [tokens, MoE layers, experts per token]."""

    text: str
    token_ids: tuple[int, ...]
    routed_range: tuple[int, int]
    experts: bytes = field(repr=False)
    weights: bytes = field(repr=False)

    @property
    def routes(self) -> ExpertRoutes:
        return ExpertRoutes(_array(self.experts), _array(self.weights))


def _array(file: bytes) -> np.ndarray:
    array: np.ndarray = np.load(io.BytesIO(file))
    return array


def answer_of(body: Any) -> Answer:
    """Of a whole completion."""
    return answer_of_pieces(body["choices"])


def answer_of_pieces(pieces: list[Any]) -> Answer:
    """Of one choice, whose last piece has the routes."""
    last = pieces[-1]
    first, end = last["routed_range"]
    return Answer(
        text="".join(piece["text"] for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece["token_ids"]),
        routed_range=(first, end),
        experts=base64.b64decode(last["routed_experts"]),
        weights=base64.b64decode(last["routed_weights"]),
    )
