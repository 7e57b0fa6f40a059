"""Recorded experts in transformers' models: applied and weighed, for padded, packed and partly recorded batches."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expert_workers.route_replay.batch import BatchLayout
from expert_workers.route_replay.ranged_routes import RangedRoutes
from expert_workers.route_replay.recording import record_routes
from expert_workers.route_replay.replay import WeightsFrom, replay_routes
from tests.expert_workers.route_replay.three_sequences import (
    IDS,
    LAYOUT,
    MASK,
    SEQUENCES,
    WEIGHTS,
    applied_routes,
    assert_same_ids,
    moved,
    own_routes,
    recorded_pass,
)
from tests.helpers.trainers import (
    FAMILIES,
    FURTHER_CONFIGS,
    left_padded,
    right_padded,
    tiny_trainer,
    token_logprobs,
)


def mean_difference(logprobs: Tensor, others: Tensor) -> float:
    where = MASK[:, 1:].bool()
    return float((logprobs - others).abs()[where].mean())


def share_of_other_experts(routes: list[RangedRoutes], others: list[RangedRoutes]) -> float:
    differ = [(a.topk_ids != b.topk_ids).any(-1) for a, b in zip(routes, others, strict=True)]
    return float(np.concatenate(differ).mean())


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
