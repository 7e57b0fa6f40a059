"""The highest expert ids on their whole way: chosen by a gate, recorded, sent, stored, compiled to a plan, replayed.

Around the numbers of experts at which an id outgrows 7 and 8 bits. Letters: T tokens, E experts.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.model_spec import SigmoidGateSpec, SoftmaxGateSpec
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes, RouteShape
from cluster.wire import Decoder, encode
from cluster.worker_messages import LateFrame, RouteFrame
from expert_workers.dispatch.local import LocalDispatcher
from expert_workers.model.experts import apply_experts, run_experts
from expert_workers.model.gate import Gate, SigmoidGate, SoftmaxGate
from expert_workers.model.numerics import FastNumerics
from expert_workers.model.weights import ExpertWeights, GateWeights
from expert_workers.route_recorder import StepRoutes
from expert_workers.stopwatch import Stopwatch
from prefix_store.packed_routes import PackedRoutes
from tests.expert_workers.dispatch.plan_cases import CPU, PlanCase, make_placement, plan_step
from tests.expert_workers.test_route_recorder import K, make_inputs

NUM_EXPERTS = (129, 255, 256, 257, 512)
GATES = ("sigmoid", "softmax")
NUM_TOKENS = 5
NUM_LAYERS = 3
HIDDEN = 8


def make_gate(kind: str, num_experts: int) -> Gate:
    """Of an identity matrix: its router logits are its input."""
    common: dict[str, Any] = {
        "num_experts": num_experts,
        "num_experts_per_tok": K,
        "norm_topk_prob": True,
    }
    weights = GateWeights(torch.eye(num_experts), None)
    if kind == "softmax":
        return SoftmaxGate(SoftmaxGateSpec(**common), weights, FastNumerics())
    spec = SigmoidGateSpec(**common, num_groups=1, topk_group=1, routed_scaling_factor=2.5)
    return SigmoidGate(spec, weights, FastNumerics())


def make_logits(num_experts: int, layer: int) -> Tensor:
    """[T, E]: the highest ids win, with other weights for every token and layer."""
    steepness = 1 + torch.arange(NUM_TOKENS) + NUM_TOKENS * layer
    return steepness[:, None] * torch.linspace(-0.1, 0.1, num_experts)


def make_shape(num_experts: int) -> RouteShape:
    return RouteShape(NUM_LAYERS, K, num_experts)


def chosen(gate: Gate, num_experts: int) -> tuple[list[tuple[Tensor, Tensor]], ExpertRoutes]:
    """What the layers get at once, and what the step records."""
    step = StepRoutes(make_inputs(NUM_TOKENS, 0), make_shape(num_experts), Stopwatch())
    layers = [
        step.topk(layer, make_logits(num_experts, layer), gate) for layer in range(NUM_LAYERS)
    ]
    return layers, step.recorded()


def sent_and_stored(routes: ExpertRoutes, num_experts: int) -> ExpertRoutes:
    """As they come back for a replay."""
    frame = RouteFrame(
        rank=0,
        step_id=1,
        seq_ids=np.zeros(1, np.int32),
        num_tokens=np.full(1, NUM_TOKENS, np.int32),
        topk_ids=routes.topk_ids,
        topk_weights=routes.topk_weights,
    )
    decoder: Decoder[LateFrame] = Decoder(LateFrame)
    arrived = decoder.decode(encode(frame))
    assert isinstance(arrived, RouteFrame)
    routes = ExpertRoutes(arrived.topk_ids, arrived.topk_weights)
    return PackedRoutes.pack(routes, 1).unpack(make_shape(num_experts))


def make_case(placement: ExpertPlacement, routes: ExpertRoutes) -> PlanCase:
    """All tokens on rank 0, from position 0 on."""
    idle: list[list[Any]] = [[] for _ in range(placement.ep_size - 1)]
    shape = make_shape(placement.num_experts)
    return PlanCase(placement, shape, [[routes], *idle], [[0], *idle])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("num_experts", NUM_EXPERTS)
def test_the_highest_ids_come_back_as_the_gate_chose_them(num_experts: int, gate: str) -> None:
    layers, recorded = chosen(make_gate(gate, num_experts), num_experts)
    stored = sent_and_stored(recorded, num_experts)
    assert stored.topk_ids.tolist() == [[[num_experts - 2, num_experts - 1]] * 3] * NUM_TOKENS
    assert stored.topk_ids.itemsize == (1 if num_experts <= 256 else 2)
    for layer, (_, weights) in enumerate(layers):
        np.testing.assert_array_equal(stored.topk_weights[:, layer], weights.numpy())


@pytest.mark.parametrize("ep_size", [1, 3, 16])
@pytest.mark.parametrize("num_experts", NUM_EXPERTS)
def test_plans_bring_all_rows_to_copies_of_the_highest_ids(num_experts: int, ep_size: int) -> None:
    _, recorded = chosen(make_gate("sigmoid", num_experts), num_experts)
    placement = make_placement(np.random.default_rng(num_experts), num_experts, ep_size)
    case = make_case(placement, sent_and_stored(recorded, num_experts))
    load = np.zeros((NUM_LAYERS, num_experts), np.int64)
    for rank in range(ep_size):
        step = plan_step(case, rank)
        assert step is not None
        np.add.at(load, (slice(None), placement.local_experts(rank)), step.expert_load)
    assert load[:, -K:].tolist() == [[NUM_TOKENS] * K] * NUM_LAYERS
    assert load.sum() == NUM_LAYERS * NUM_TOKENS * K


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("num_experts", NUM_EXPERTS)
def test_a_planned_replay_has_the_bytes_of_what_the_gate_chose(num_experts: int, gate: str) -> None:
    layers, recorded = chosen(make_gate(gate, num_experts), num_experts)
    placement = ExpertPlacement.contiguous(num_experts, 1)
    step = plan_step(make_case(placement, sent_and_stored(recorded, num_experts)), 0)
    assert step is not None
    weights, x = make_weights(num_experts), torch.randn(NUM_TOKENS, HIDDEN, generator=seeded(1))
    dispatcher = LocalDispatcher(placement, CPU)
    for layer, (topk_ids, topk_weights) in enumerate(layers):
        tokens = dispatcher.dispatch(x, topk_ids, topk_weights, torch.arange(NUM_TOKENS))
        expected = dispatcher.combine(run_experts(tokens, weights, FastNumerics()), tokens.handle)
        received = step.dispatch(layer, x)
        y = apply_experts(received, step.layout(layer), weights, FastNumerics())
        assert step.combine(layer, y).numpy().tobytes() == expected.numpy().tobytes()


def make_weights(num_experts: int) -> ExpertWeights:
    """Every expert computes something else."""
    return ExpertWeights(
        gate_up=torch.randn(num_experts, 2 * HIDDEN, HIDDEN, generator=seeded(2)),
        down=torch.randn(num_experts, HIDDEN, HIDDEN, generator=seeded(3)),
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
