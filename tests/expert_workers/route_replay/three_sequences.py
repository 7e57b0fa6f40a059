"""A batch of three sequences for tiny trainers: recorded, replayed, compared."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expert_workers.route_replay.batch import BatchLayout
from expert_workers.route_replay.ranged_routes import RangedRoutes
from expert_workers.route_replay.recording import record_routes
from expert_workers.route_replay.replay import WeightsFrom, replay_routes
from tests.helpers.trainers import (
    perturb_gates,
    right_padded,
    token_logprobs,
)

WEIGHTS: tuple[WeightsFrom, ...] = ("recomputed", "recorded")
SEQUENCES = [
    np.random.default_rng(seed).integers(3, 256, length).tolist()
    for seed, length in enumerate((37, 20, 41))
]
IDS, MASK = right_padded(SEQUENCES)
LAYOUT = BatchLayout.padded(MASK)
WHOLE_IDS = torch.tensor([SEQUENCES[0]])
WHOLE_MASK = torch.ones_like(WHOLE_IDS)
WHOLE = BatchLayout.padded(WHOLE_MASK)
"""A batch without padding."""


@contextmanager
def recorded_pass(model: Any, ids: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Any]]:
    """Log-probs of a scoring pass and its recording."""
    with torch.no_grad(), record_routes(model) as recording:
        yield token_logprobs(model, ids, mask), recording


def own_routes(model: Any, ids: Tensor = IDS, mask: Tensor = MASK) -> list[RangedRoutes]:
    with recorded_pass(model, ids, mask) as (_, recording):
        return list(recording.routes(BatchLayout.padded(mask)))


def applied_routes(
    model: Any, routes: list[RangedRoutes | None], topk_weights: WeightsFrom
) -> list[RangedRoutes]:
    """What a pass with replay hands to the experts."""
    with replay_routes(model, LAYOUT, routes, topk_weights=topk_weights):
        return own_routes(model)


def moved(model: Any, share: float = 0.02) -> Any:
    """A copy after an update of its gates."""
    trainer = copy.deepcopy(model)
    perturb_gates(trainer, share=share)
    return trainer


def assert_same_ids(routes: list[RangedRoutes], expected: list[RangedRoutes]) -> None:
    for mine, other in zip(routes, expected, strict=True):
        np.testing.assert_array_equal(mine.topk_ids, other.topk_ids)


def checkpoint(model: Any, reentrant: bool) -> None:
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
