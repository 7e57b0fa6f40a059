"""Where a step's routes come from (the gate or the store) and what the gate chose. One object per step.

Letters: T tokens, G tokens of the gate (the first ones), L MoE layers, K experts per token.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cluster.routes import ExpertRoutes, RouteShape
from expert_workers.model.gate import GateChoice
from expert_workers.step_inputs import StepInputs
from expert_workers.stopwatch import Stopwatch

Gate = Callable[[Tensor], GateChoice]


class StepRoutes:
    """Owner of one step's recorded routes. Rows [0, G) are chosen and recorded, the others replayed."""

    def __init__(self, inputs: StepInputs, shape: RouteShape, stopwatch: Stopwatch) -> None:
        self._inputs = inputs
        self._shape = shape
        self._stopwatch = stopwatch
        dims = (inputs.num_gate_tokens, shape.num_moe_layers, shape.num_experts_per_tok)
        id_dtype = torch.uint8 if shape.id_dtype == np.uint8 else torch.uint16
        self._topk_ids = torch.empty(dims, dtype=id_dtype, device=inputs.device)
        self._topk_weights = torch.empty(dims, dtype=torch.float32, device=inputs.device)
        self._poisoned = torch.zeros(inputs.num_tokens, dtype=torch.bool, device=inputs.device)

    @property
    def positions(self) -> Tensor:
        """[T] int64 of the step's tokens in their sequences."""
        return self._inputs.positions

    def topk(self, moe_layer: int, x: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
        """Ids [T, K] int64 ascending within a token and weights [T, K] float32 for x [T, H] of one layer, without the
        planned tokens.

        The gate computes nothing for replayed rows; without rows of its own it is not called.
        """
        num_gate_tokens = self._inputs.num_gate_tokens
        replay_ids = self._inputs.replay_topk_ids[:, moe_layer]
        replay_weights = self._inputs.replay_topk_weights[:, moe_layer]
        if num_gate_tokens == 0:
            return replay_ids, replay_weights
        with self._stopwatch.measure("gate"):
            choice = gate(x[:num_gate_tokens])
        self._topk_ids[:, moe_layer] = choice.topk_ids.to(self._topk_ids.dtype)
        self._topk_weights[:, moe_layer] = choice.topk_weights
        self._poisoned[:num_gate_tokens] |= choice.poisoned
        if num_gate_tokens == x.shape[0]:
            return choice.topk_ids, choice.topk_weights
        return (
            torch.cat([choice.topk_ids, replay_ids]),
            torch.cat([choice.topk_weights, replay_weights]),
        )

    def recorded(self) -> ExpertRoutes:
        """What the gate chose for tokens [0, G), once every layer has run. Copies to the host."""
        return ExpertRoutes(
            self._topk_ids.cpu().numpy(),
            self._topk_weights.cpu().numpy().astype(self._shape.weight_dtype, copy=False),
        )

    def poisoned_tokens(self) -> Tensor:
        """[T] bool on the host: tokens for which a router logit of some layer was not finite."""
        return self._poisoned.cpu()
