"""Rollouts of a served model as a trainer takes them: a batch of sequences, their routes, what the server said of them.

Letters: B sequences, S columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import torch
from torch import Tensor

from expert_workers.route_replay.batch import BatchLayout
from expert_workers.route_replay.ranged_routes import RangedRoutes, routes_of_choice
from expert_workers.route_replay.recording import record_routes
from expert_workers.route_replay.replay import WeightsFrom, replay_routes
from tests.helpers.http_cell import MODEL
from tests.helpers.trainers import right_padded, token_logprobs


@dataclass(frozen=True, eq=False)
class Rollouts:
    """input_ids, attention_mask: [B, S] int64, padded on the right.
    logprobs: [B, S − 1] float32 as whoever made them said, of the tokens in `scored` [B, S − 1] bool.
    """

    input_ids: Tensor
    attention_mask: Tensor
    routes: list[RangedRoutes]
    logprobs: Tensor
    scored: Tensor

    @property
    def layout(self) -> BatchLayout:
        return BatchLayout.padded(self.attention_mask)


@dataclass(frozen=True)
class Difference:
    """mean, largest: of a trainer's log-probs from the rollouts' own, over scored tokens, in nats.
    other_experts: share of (token, MoE layer) with another set of experts, over tokens with routes.
    """

    mean: float
    largest: float
    other_experts: float


def sampled_rollouts(
    client: httpx.Client, prompts: Sequence[list[int]], max_tokens: int
) -> Rollouts:
    """Of a cell: one completion per prompt at temperature 1."""
    body = {
        "model": MODEL,
        "prompt": list(prompts),
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": 5,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        "return_routed_experts": "weights",
    }
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return rollouts_of(response.json(), prompts)


def rollouts_of(answer: Any, prompts: Sequence[list[int]]) -> Rollouts:
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    pairs = list(zip(prompts, choices, strict=True))
    input_ids, attention_mask = right_padded([p + c["token_ids"] for p, c in pairs])
    logprobs = torch.zeros(input_ids.shape[0], input_ids.shape[1] - 1)
    scored = torch.zeros_like(logprobs, dtype=torch.bool)
    for row, (prompt, choice) in enumerate(pairs):
        said = torch.tensor(choice["logprobs"]["token_logprobs"])
        where = slice(len(prompt) - 1, len(prompt) - 1 + len(said))
        logprobs[row, where], scored[row, where] = said, True
    routes = [routes_of_choice(answer, choice["index"]) for choice in choices]
    return Rollouts(input_ids, attention_mask, routes, logprobs, scored)


def recorded_rollouts(model: Any, sequences: Sequence[list[int]]) -> Rollouts:
    """Given sequences, scored and routed by a model of transformers."""
    input_ids, attention_mask = right_padded(sequences)
    with torch.no_grad(), record_routes(model) as recording:
        logprobs = token_logprobs(model, input_ids, attention_mask)
    routes = recording.routes(BatchLayout.padded(attention_mask))
    return Rollouts(input_ids, attention_mask, routes, logprobs, attention_mask[:, 1:].bool())


def difference(trainer: Any, rollouts: Rollouts, topk_weights: WeightsFrom | None) -> Difference:
    """topk_weights None: the trainer's own gate chooses."""
    if topk_weights is None:
        return _difference(trainer, rollouts)
    with replay_routes(trainer, rollouts.layout, rollouts.routes, topk_weights=topk_weights):
        return _difference(trainer, rollouts)


def _difference(trainer: Any, rollouts: Rollouts) -> Difference:
    mine = recorded_rollouts_of(trainer, rollouts)
    apart = (mine.logprobs - rollouts.logprobs).abs()[rollouts.scored]
    others = [
        (a.topk_ids[b.start : b.end] != b.topk_ids).any(-1)
        for a, b in zip(mine.routes, rollouts.routes, strict=True)
    ]
    return Difference(float(apart.mean()), float(apart.max()), float(np.concatenate(others).mean()))


def recorded_rollouts_of(trainer: Any, rollouts: Rollouts) -> Rollouts:
    """The same sequences as this model scores and routes them."""
    pairs = zip(rollouts.input_ids.tolist(), rollouts.layout.sequences, strict=True)
    return recorded_rollouts(trainer, [row[: len(tokens)] for row, tokens in pairs])
