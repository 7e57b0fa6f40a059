"""Recorded experts in transformers' models, forward and backward: applied, weighed, and gone without a trace."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cluster.errors import RouteReplayError
from expert_workers.route_replay.batch import BatchLayout
from expert_workers.route_replay.ranged_routes import RangedRoutes
from expert_workers.route_replay.recording import record_routes
from expert_workers.route_replay.replay import WeightsFrom, replay_routes
from tests.helpers.trainers import (
    FAMILIES,
    FURTHER_CONFIGS,
    gates,
    left_padded,
    perturb_gates,
    right_padded,
    tiny_trainer,
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


def mean_difference(logprobs: Tensor, others: Tensor) -> float:
    where = MASK[:, 1:].bool()
    return float((logprobs - others).abs()[where].mean())


def share_of_other_experts(routes: list[RangedRoutes], others: list[RangedRoutes]) -> float:
    differ = [(a.topk_ids != b.topk_ids).any(-1) for a, b in zip(routes, others, strict=True)]
    return float(np.concatenate(differ).mean())


def assert_same_ids(routes: list[RangedRoutes], expected: list[RangedRoutes]) -> None:
    for mine, other in zip(routes, expected, strict=True):
        np.testing.assert_array_equal(mine.topk_ids, other.topk_ids)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("topk_weights", WEIGHTS)
@pytest.mark.parametrize("family", [*FAMILIES, *FURTHER_CONFIGS])
def test_a_pass_with_its_own_routes_says_the_same(
    family: str, topk_weights: WeightsFrom, experts: str
) -> None:
    model = tiny_trainer(family, experts=experts)
    with recorded_pass(model, IDS, MASK) as (logprobs, recording):
        routes = recording.routes(LAYOUT)
    with torch.no_grad(), replay_routes(model, LAYOUT, routes, topk_weights=topk_weights):
        again = token_logprobs(model, IDS, MASK)
    torch.testing.assert_close(again, logprobs, rtol=0.0, atol=2e-5)
    assert_same_ids(applied_routes(model, routes, topk_weights), routes)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("qwen3_moe", {}),
        ("olmoe", {}),
        ("deepseek_v3", {"routed_scaling_factor": 1.0}),
        ("deepseek_v3", {"routed_scaling_factor": 2.5}),
    ],
)
def test_every_setting_of_a_gate_is_weighed_as_by_the_gate(
    family: str, setting: dict[str, Any], norm_topk_prob: bool
) -> None:
    model = tiny_trainer(family, norm_topk_prob=norm_topk_prob, **setting)
    routes = own_routes(model)
    for mine, expected in zip(applied_routes(model, routes, "recomputed"), routes, strict=True):
        np.testing.assert_allclose(mine.topk_weights, expected.topk_weights, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_weights_are_applied_to_the_byte(family: str) -> None:
    model = tiny_trainer(family)
    routes = own_routes(model)
    applied = applied_routes(moved(model), routes, "recorded")
    for mine, expected in zip(applied, routes, strict=True):
        np.testing.assert_array_equal(mine.topk_weights, expected.topk_weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trainer_whose_gates_moved_is_closer_with_the_recorded_experts(family: str) -> None:
    model = tiny_trainer(family)
    with recorded_pass(model, IDS, MASK) as (logprobs, recording):
        routes = recording.routes(LAYOUT)
    trainer = moved(model)
    with recorded_pass(trainer, IDS, MASK) as (own, recording):
        assert share_of_other_experts(recording.routes(LAYOUT), routes) > 0.01
    differences = {}
    for topk_weights in WEIGHTS:
        with torch.no_grad(), replay_routes(trainer, LAYOUT, routes, topk_weights=topk_weights):
            differences[topk_weights] = mean_difference(
                token_logprobs(trainer, IDS, MASK), logprobs
            )
        assert_same_ids(applied_routes(trainer, routes, topk_weights), routes)
    assert differences["recomputed"] < 0.8 * mean_difference(own, logprobs)
    assert differences["recorded"] < 2e-5  # nothing but gates has moved


@pytest.mark.parametrize("topk_weights", WEIGHTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trainer_in_bfloat16_applies_the_recorded_experts(
    family: str, topk_weights: WeightsFrom
) -> None:
    model = tiny_trainer(family)
    routes = own_routes(model)
    trainer = copy.deepcopy(model).to(torch.bfloat16)
    assert share_of_other_experts(own_routes(trainer), routes) > 0.0
    applied = applied_routes(trainer, routes, topk_weights)
    assert_same_ids(applied, routes)
    for mine, expected in zip(applied, routes, strict=True):
        np.testing.assert_allclose(mine.topk_weights, expected.topk_weights, rtol=0.3, atol=0.02)


def test_in_training_mode_the_recorded_experts_are_applied_too() -> None:
    model = tiny_trainer("mixtral", router_jitter_noise=0.3)
    routes = own_routes(model)
    assert_same_ids(applied_routes(model.train(), routes, "recorded"), routes)


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


def checkpoint(model: Any, reentrant: bool) -> None:
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()


@pytest.mark.parametrize("padded", [right_padded, left_padded])
def test_padding_may_be_on_either_side(padded: Any) -> None:
    model = tiny_trainer("qwen3_moe")
    alone = [
        own_routes(model, torch.tensor([s]), torch.ones(1, len(s), dtype=torch.int64))[0]
        for s in SEQUENCES
    ]
    ids, mask = padded(SEQUENCES)
    assert_same_ids(own_routes(model, ids, mask), alone)
    trainer, layout = moved(model), BatchLayout.padded(mask)
    with replay_routes(trainer, layout, alone, topk_weights="recomputed"):
        assert_same_ids(own_routes(trainer, ids, mask), alone)


def test_several_sequences_may_be_packed_into_one_row() -> None:
    model = tiny_trainer("qwen3_moe")
    routes = own_routes(model)
    trainer, layout = moved(model), BatchLayout.packed([len(s) for s in SEQUENCES])
    ids = torch.tensor([[token for sequence in SEQUENCES for token in sequence]])
    positions = torch.cat([torch.arange(len(s)) for s in SEQUENCES])[None]
    with (
        torch.no_grad(),
        replay_routes(trainer, layout, routes, topk_weights="recorded"),
        record_routes(trainer) as recording,
    ):
        logits = trainer(ids, position_ids=positions, use_cache=False).logits[0]
    assert_same_ids(recording.routes(layout), routes)
    with torch.no_grad():
        expected = model(IDS, attention_mask=MASK, use_cache=False).logits
    for row, sequence in enumerate(layout.sequences):
        mine = logits[sequence.start : sequence.stop]
        torch.testing.assert_close(mine, expected[row, : len(sequence)], rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("topk_weights", WEIGHTS)
def test_tokens_outside_the_range_and_sequences_without_routes_use_the_gate(
    topk_weights: WeightsFrom,
) -> None:
    model = tiny_trainer("deepseek_v3")
    trainer = moved(model, share=0.3)
    whole, own = own_routes(model), own_routes(trainer)
    given = [part(whole[0], 5, 12), None, part(whole[2], 0, 40)]
    applied = applied_routes(trainer, given, topk_weights)
    first = [routes.topk_ids[:, 0] for routes in applied]  # what comes in is the same there
    np.testing.assert_array_equal(first[0][5:12], whole[0].topk_ids[5:12, 0])
    np.testing.assert_array_equal(first[0][:5], own[0].topk_ids[:5, 0])
    np.testing.assert_array_equal(first[0][12:], own[0].topk_ids[12:, 0])
    np.testing.assert_array_equal(first[1], own[1].topk_ids[:, 0])
    np.testing.assert_array_equal(first[2][:40], whole[2].topk_ids[:40, 0])
    np.testing.assert_array_equal(applied[2].topk_ids[:40], whole[2].topk_ids[:40])


def part(routes: RangedRoutes, start: int, end: int) -> RangedRoutes:
    assert routes.topk_weights is not None
    return RangedRoutes(routes.topk_ids[start:end], routes.topk_weights[start:end], start)


def test_router_logits_are_still_the_gates() -> None:
    model = tiny_trainer("mixtral")
    trainer = moved(model, share=0.3)
    with (
        torch.no_grad(),
        replay_routes(trainer, LAYOUT, own_routes(model), topk_weights="recorded"),
    ):
        output = trainer(IDS, attention_mask=MASK, output_router_logits=True)
    with torch.no_grad():
        expected = trainer(IDS, attention_mask=MASK, output_router_logits=True)
    assert torch.equal(output.router_logits[0], expected.router_logits[0])


def traces(model: Any) -> dict[str, Any]:
    """All that a module can be found out by: what it holds, its hooks, its methods, its weights."""
    held = {name: sorted(vars(module)) for name, module in model.named_modules()}
    hooks = {
        (name, kind): dict(value)
        for name, module in model.named_modules()
        for kind, value in vars(module).items()
        if "hooks" in kind and isinstance(value, dict)
    }
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        logits = model(IDS, attention_mask=MASK, use_cache=False).logits
    return {"held": held, "hooks": hooks, "weights": weights, "logits": logits}


def assert_no_trace(model: Any, before: dict[str, Any]) -> None:
    after = traces(model)
    assert after["held"] == before["held"]
    assert after["hooks"] == before["hooks"]
    assert list(after["weights"]) == list(before["weights"])
    for name, tensor in after["weights"].items():
        assert torch.equal(tensor, before["weights"][name])
    assert torch.equal(after["logits"], before["logits"])


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_and_recording_leave_no_trace(family: str) -> None:
    model = tiny_trainer(family)
    checkpoint(model, reentrant=False)
    before = traces(model)
    routes = own_routes(moved(model, share=0.3))
    for topk_weights in WEIGHTS:
        with replay_routes(model, LAYOUT, routes, topk_weights=topk_weights):
            own_routes(model)
    assert_no_trace(model, before)


def test_an_exception_leaves_no_trace_either() -> None:
    model = tiny_trainer("olmoe")
    before, routes = traces(model), own_routes(model)
    with (
        pytest.raises(KeyError, match="of the loop"),
        replay_routes(model, LAYOUT, routes, topk_weights="recorded"),
        record_routes(model),
    ):
        raise KeyError("of the loop")
    with (
        pytest.raises(RouteReplayError, match="a pass over 37 tokens inside the replay"),
        replay_routes(model, LAYOUT, routes, topk_weights="recorded"),
    ):
        token_logprobs(model, WHOLE_IDS, WHOLE_MASK)
    assert_no_trace(model, before)


def test_a_replay_around_a_recording_and_within_one_are_recorded_alike() -> None:
    model = tiny_trainer("qwen3_moe")
    routes = own_routes(model)
    trainer = moved(model, share=0.3)
    with (
        torch.no_grad(),
        record_routes(trainer) as recording,
        replay_routes(trainer, LAYOUT, routes, topk_weights="recorded"),
    ):
        token_logprobs(trainer, IDS, MASK)
    assert_same_ids(recording.routes(LAYOUT), routes)


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
