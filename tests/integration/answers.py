"""What a client got for one completion that returns token ids, experts and weights; equal when all bytes are."""

import base64
import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.routes import ExpertRoutes
from tests.integration.api import CellApi, completion_body

EVERYTHING: dict[str, Any] = {"return_token_ids": True, "return_routed_experts": "weights"}


@dataclass(frozen=True)
class Answer:
    """experts, weights: files in NumPy's format, [tokens, MoE layers, experts per token]."""

    text: str
    token_ids: tuple[int, ...]
    routed_range: tuple[int, int]
    experts: bytes
    weights: bytes

    @property
    def routes(self) -> ExpertRoutes:
        return ExpertRoutes(_array(self.experts), _array(self.weights))


def _array(file: bytes) -> np.ndarray:
    array: np.ndarray = np.load(io.BytesIO(file))
    return array


def answer_of(body: Any) -> Answer:
    """Of a whole completion."""
    (choice,) = body["choices"]
    return _answer([choice])


def streamed(api: CellApi, prompt: list[int], max_tokens: int, **fields: Any) -> Answer:
    body = completion_body(prompt, max_tokens, stream=True, **EVERYTHING, **fields)
    choices: list[Any] = []
    with api.http.stream("POST", f"{api.base_url}/v1/completions", json=body) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                choices += json.loads(line.removeprefix("data: "))["choices"]
    return _answer(choices)


def _answer(choices: list[Any]) -> Answer:
    """Of the pieces of one choice, of which the last has the routes."""
    first, end = choices[-1]["routed_range"]
    return Answer(
        text="".join(choice["text"] for choice in choices),
        token_ids=tuple(token for choice in choices for token in choice["token_ids"]),
        routed_range=(first, end),
        experts=base64.b64decode(choices[-1]["routed_experts"]),
        weights=base64.b64decode(choices[-1]["routed_weights"]),
    )
