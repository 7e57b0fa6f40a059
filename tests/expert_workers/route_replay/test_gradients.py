"""Recorded experts through backward(): gradients, and what activation checkpointing computes again."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.errors import RouteReplayError
from expert_workers.route_replay.batch import BatchLayout
from expert_workers.route_replay.recording import record_routes
from expert_workers.route_replay.replay import WeightsFrom, replay_routes
from tests.expert_workers.route_replay.three_sequences import (
    IDS,
    LAYOUT,
    MASK,
    WEIGHTS,
    WHOLE_IDS,
    WHOLE_MASK,
    assert_same_ids,
    checkpoint,
    moved,
    own_routes,
)
from tests.helpers.trainers import (
    FAMILIES,
    gates,
    perturb_gates,
    tiny_trainer,
    token_logprobs,
)


def gradients(
    model: Any, replay: AbstractContextManager[None], ids: Tensor = IDS, mask: Tensor = MASK
) -> dict[str, Tensor]:
    """Of the mean log-prob, backward() within `replay`."""
    model.zero_grad(set_to_none=True)
    with replay:
        where = mask[:, 1:].bool()
        token_logprobs(model, ids, mask)[where].mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_with_recomputed_weights_gradients_are_those_of_a_gate_that_chooses_the_same(
    family: str,
) -> None:
    model = tiny_trainer(family)
    routes = own_routes(model)
    expected = gradients(model, nullcontext())
    replay = replay_routes(model, LAYOUT, routes, topk_weights="recomputed")
    for name, gradient in gradients(model, replay).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)
    for gate in gates(model):
        assert float(gate.weight.grad.abs().max()) > 1e-4


@pytest.mark.parametrize(("ids", "mask"), [(IDS, MASK), (WHOLE_IDS, WHOLE_MASK)])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_recorded_weights_the_gradient_of_the_gates_alone_is_zero(
    family: str, ids: Tensor, mask: Tensor
) -> None:
    model = tiny_trainer(family)
    routes = own_routes(model, ids, mask)
    replay = replay_routes(model, BatchLayout.padded(mask), routes, topk_weights="recorded")
    found = gradients(model, replay, ids, mask)
    zero = {name for name, gradient in found.items() if float(gradient.abs().max()) == 0.0}
    assert zero == {name for name in found if name.endswith("mlp.gate.weight")}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("topk_weights", WEIGHTS)
def test_what_checkpointing_computes_again_has_the_same_experts(
    topk_weights: WeightsFrom, reentrant: bool
) -> None:
    model = tiny_trainer("deepseek_v3")
    routes = own_routes(model)
    trainer = moved(model, share=0.2).train()
    plain = gradients(trainer, replay_routes(trainer, LAYOUT, routes, topk_weights=topk_weights))
    checkpoint(trainer, reentrant)
    again = gradients(trainer, replay_routes(trainer, LAYOUT, routes, topk_weights=topk_weights))
    for name, gradient in again.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_that_would_compute_again_after_the_replay_is_refused(reentrant: bool) -> None:
    model = tiny_trainer("qwen3_moe").train()
    routes = own_routes(model)
    checkpoint(model, reentrant)
    with replay_routes(model, LAYOUT, routes, topk_weights="recomputed"):
        loss = token_logprobs(model, IDS, MASK).mean()
    with pytest.raises(RouteReplayError, match="call it before leaving the replay"):
        loss.backward()


def test_without_checkpointing_backward_may_come_after_the_replay() -> None:
    model = tiny_trainer("qwen3_moe").train()
    routes = own_routes(model)
    within = gradients(model, replay_routes(model, LAYOUT, routes, topk_weights="recomputed"))
    model.zero_grad(set_to_none=True)
    with replay_routes(model, LAYOUT, routes, topk_weights="recomputed"):
        loss = token_logprobs(model, IDS, MASK)[MASK[:, 1:].bool()].mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, within[name])


def test_recording_takes_the_pass_and_not_what_checkpointing_computes_again() -> None:
    model = tiny_trainer("qwen3_moe").train()
    expected = own_routes(model)
    checkpoint(model, reentrant=False)
    with record_routes(model) as recording:
        loss = token_logprobs(model, IDS, MASK).mean()
        perturb_gates(model, share=0.5)  # what is computed again now chooses others
        with pytest.raises((RuntimeError, torch.utils.checkpoint.CheckpointError)):
            loss.backward()
    assert_same_ids(recording.routes(LAYOUT), expected)
