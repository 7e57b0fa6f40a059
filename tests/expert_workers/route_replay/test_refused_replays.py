"""Routes, models and passes that cannot be replayed or recorded are refused with what is wrong."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cluster.errors import RouteReplayError
from expert_workers.route_replay.batch import BatchLayout
from expert_workers.route_replay.ranged_routes import RangedRoutes
from expert_workers.route_replay.recording import record_routes
from expert_workers.route_replay.replay import replay_routes
from tests.expert_workers.route_replay.three_sequences import (
    IDS,
    LAYOUT,
    MASK,
    WHOLE,
    assert_same_ids,
    own_routes,
)
from tests.helpers.trainers import (
    tiny_trainer,
    token_logprobs,
)


def test_a_recording_says_what_it_lacks() -> None:
    model = tiny_trainer("olmoe")
    with record_routes(model) as recording, pytest.raises(RouteReplayError, match="no complete"):
        recording.routes(LAYOUT)
    with record_routes(model) as recording, torch.no_grad():
        token_logprobs(model, IDS, MASK)
        with pytest.raises(RouteReplayError, match="a second forward pass"):
            token_logprobs(model, IDS, MASK)
    with pytest.raises(RouteReplayError, match=r"pass over 123 tokens .* layout has 37"):
        recording.routes(WHOLE)


def first_layer(one: RangedRoutes) -> dict[str, Any]:
    assert one.topk_weights is not None
    return {"topk_ids": one.topk_ids[:, :1], "topk_weights": one.topk_weights[:, :1]}


def test_routes_of_another_model_are_refused() -> None:
    model = tiny_trainer("qwen3_moe")
    routes = own_routes(model)
    without = [RangedRoutes(one.topk_ids) for one in routes]
    one_layer = [RangedRoutes(**first_layer(one)) for one in routes]
    three = [RangedRoutes(one.topk_ids[..., :3]) for one in routes]
    beyond = [RangedRoutes(one.topk_ids.astype(np.uint16) + 5) for one in routes]
    cases: list[tuple[list[RangedRoutes], Any, str]] = [
        (without, "recorded", "the routes have no weights"),
        (one_layer, "recorded", "routes of 1 MoE layers for a model with 2"),
        (three, "recomputed", "routes of 3 experts per token for a gate that chooses 4"),
        (beyond, "recomputed", "supported: below 16"),
        (routes, "current", "topk_weights = 'current'"),
    ]
    for given, topk_weights, message in cases:
        with (
            pytest.raises(RouteReplayError) as refused,
            replay_routes(model, LAYOUT, given, topk_weights=topk_weights),
        ):
            pass
        assert message in str(refused.value)


def test_two_replays_at_once_are_refused() -> None:
    model = tiny_trainer("olmoe")
    routes = own_routes(model)
    with replay_routes(model, LAYOUT, routes, topk_weights="recorded"):
        with (
            pytest.raises(RouteReplayError, match="being replayed here already"),
            replay_routes(model, LAYOUT, routes, topk_weights="recorded"),
        ):
            pass
        assert_same_ids(own_routes(model), routes)


def test_a_replay_through_which_no_pass_went_says_so() -> None:
    model = tiny_trainer("olmoe")
    other, routes = copy.deepcopy(model), own_routes(model)
    with (
        pytest.raises(RouteReplayError, match="nothing was replayed in 2 of 2 MoE layers"),
        replay_routes(model, LAYOUT, routes, topk_weights="recorded"),
    ):
        token_logprobs(other, IDS, MASK)


class OddGate(nn.Module):
    """Looks like a softmax gate; weighs by squares, or returns something else."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
        self.num_experts, self.top_k = 8, 2
        self._output = output

    def forward(self, hidden: Tensor) -> object:
        logits = hidden @ self.weight.T
        shares, ids = logits.softmax(-1).topk(2)
        if self._output == "squares":
            return logits, shares**2, ids
        return (shares, ids) if self._output == "pair" else (ids, logits, shares)


class OddLayer(nn.Module):
    def __init__(self, gate: nn.Module, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts or nn.Identity()

    def forward(self, hidden: Tensor) -> object:
        return self.gate(hidden)


ODD_ROUTES = [RangedRoutes(np.array([[[0, 1]], [[2, 7]]]), np.ones((2, 1, 2), np.float32))]
ODD_LAYOUT = BatchLayout.packed([2])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("squares", 'weighs experts otherwise .* replay with topk_weights="recorded"'),
        ("pair", "does not return .logits, weights, ids."),
        ("other order", "instead of logits"),
    ],
)
def test_a_gate_that_only_looks_known_is_refused_in_the_pass(output: str, message: str) -> None:
    model = nn.Sequential(OddLayer(OddGate(output)))
    with (
        pytest.raises(RouteReplayError, match=message),
        replay_routes(model, ODD_LAYOUT, ODD_ROUTES, topk_weights="recomputed"),
    ):
        model(torch.randn(2, 4, generator=torch.Generator().manual_seed(1)))


def test_recorded_weights_need_no_known_formula() -> None:
    model = nn.Sequential(OddLayer(OddGate("squares")))
    with replay_routes(model, ODD_LAYOUT, ODD_ROUTES, topk_weights="recorded"):
        _, weights, ids = model(torch.zeros(2, 4))
    assert ids.tolist() == [[0, 1], [2, 7]]
    assert weights.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_models_that_cannot_be_replayed_are_refused_by_name() -> None:
    spread = nn.Identity()
    spread._is_expert_parallel = True
    compiled_part = nn.Sequential(OddLayer(OddGate("squares")))
    compiled_part[0].compile(backend="eager")
    gateless = OddLayer(nn.Identity())
    del gateless.gate
    cases: list[tuple[nn.Module, str]] = [
        (nn.Sequential(nn.Linear(2, 2)), "Sequential has no MoE layer"),
        (nn.Sequential(OddLayer(nn.Linear(4, 8))), "0: the gate Linear is not known"),
        (nn.Sequential(gateless), "is not a child named gate or router"),
        (nn.Sequential(OddLayer(OddGate("squares"), spread)), "spread over processes"),
        (torch.compile(tiny_trainer("olmoe"), backend="eager"), "is compiled by torch.compile"),
        (compiled_part, "0 is compiled by torch.compile"),
    ]
    for model, message in cases:
        with pytest.raises(RouteReplayError) as refused, record_routes(model):
            pass
        assert message in str(refused.value)
