from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.model_spec import SigmoidGateSpec, SoftmaxGateSpec
from expert_workers.model.gate import GateChoice, SigmoidGate, SoftmaxGate
from expert_workers.model.numerics import DeterministicNumerics, FastNumerics, Numerics
from expert_workers.model.weights import GateWeights
from tests.reference.plain_gate import plain_sigmoid_gate, plain_softmax_gate

NUMERICS = [FastNumerics(), DeterministicNumerics()]


def make_spec(**changes: Any) -> SigmoidGateSpec:
    fields = {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_groups": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    return SigmoidGateSpec(**(fields | changes))


def choose(
    spec: SigmoidGateSpec, router_logits: Tensor, bias: Tensor, numerics: Numerics | None = None
) -> GateChoice:
    """The gate of an identity matrix: its router logits are its input."""
    weights = GateWeights(torch.eye(spec.num_experts), bias)
    return SigmoidGate(spec, weights, numerics or FastNumerics())(router_logits)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("numerics", NUMERICS, ids=["fast", "deterministic"])
@pytest.mark.parametrize(
    "spec",
    [
        make_spec(),
        make_spec(norm_topk_prob=False, routed_scaling_factor=1.0),
        make_spec(num_groups=1, topk_group=1, num_experts_per_tok=3),
        make_spec(num_groups=8, topk_group=2, num_experts_per_tok=4),
        make_spec(topk_group=4, num_experts_per_tok=16),
        make_spec(num_experts=320, num_groups=8, topk_group=3, num_experts_per_tok=8),
    ],
    ids=["plain", "raw_weights", "one_group", "kept_is_all", "every_expert", "many"],
)
def test_choice_equals_the_plain_sigmoid_gate(spec: SigmoidGateSpec, numerics: Numerics) -> None:
    logits, bias = normal(50, spec.num_experts), 0.3 * normal(spec.num_experts, seed=1)
    choice = choose(spec, logits, bias, numerics)
    plain = [plain_sigmoid_gate(spec, row, bias.tolist()) for row in logits.tolist()]
    assert choice.topk_ids.tolist() == [ids for ids, _ in plain]
    expected = torch.tensor([weights for _, weights in plain])
    torch.testing.assert_close(choice.topk_weights, expected, rtol=1e-5, atol=1e-6)
    assert choice.topk_ids.dtype == torch.int64
    assert choice.topk_weights.dtype == torch.float32
    assert not choice.poisoned.any()


def test_strongly_negative_bias_lets_no_dropped_group_win() -> None:
    spec, bias = make_spec(), torch.full((16,), -5.0)
    logits = normal(200, 16)
    choice = choose(spec, logits, bias)
    groups = (choice.topk_ids // 4).sort(dim=-1).values
    assert int((groups.diff(dim=-1) > 0).sum(dim=-1).max()) <= 1
    assert choice.topk_ids.tolist() == [
        plain_sigmoid_gate(spec, r, bias.tolist())[0] for r in logits.tolist()
    ]


def test_bias_moves_the_selection_and_not_the_weights() -> None:
    spec = make_spec(num_groups=1, topk_group=1, num_experts_per_tok=1, norm_topk_prob=False)
    bias = torch.zeros(16)
    bias[9] = 10.0
    choice = choose(spec, torch.zeros(1, 16), bias)
    assert choice.topk_ids.tolist() == [[9]]
    assert choice.topk_weights.tolist() == [[0.5 * 2.5]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("everywhere", [True, False])
def test_non_finite_rows_are_reported_and_touch_no_other(bad: float, everywhere: bool) -> None:
    spec, bias = make_spec(), 0.3 * normal(16, seed=1)
    clean = normal(9, 16)
    logits = clean.clone()
    logits[4, slice(None) if everywhere else 3] = bad
    weights = GateWeights(torch.eye(16), bias)
    choice = SigmoidGate(spec, weights, GivenLogits(logits))(clean)
    expected = choose(spec, clean, bias)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert choice.poisoned.nonzero().flatten().tolist() == [4]
    assert torch.equal(choice.topk_ids[others], expected.topk_ids[others])
    assert torch.equal(choice.topk_weights[others], expected.topk_weights[others])
    assert len(set(choice.topk_ids[4].tolist())) == 4
    assert set(choice.topk_ids[4].tolist()) <= set(range(16))
    assert choice.topk_weights.isfinite().all()


def test_saturated_scores_still_give_distinct_experts() -> None:
    choice = choose(make_spec(), torch.full((3, 16), 60.0), torch.zeros(16))
    assert all(len(set(ids)) == 4 for ids in choice.topk_ids.tolist())


def test_no_tokens_give_no_routes() -> None:
    choice = choose(make_spec(), torch.zeros(0, 16), torch.zeros(16), DeterministicNumerics())
    assert choice.topk_ids.shape == choice.topk_weights.shape == (0, 4)


def choose_by_softmax(
    spec: SoftmaxGateSpec, router_logits: Tensor, numerics: Numerics | None = None
) -> GateChoice:
    weights = GateWeights(torch.eye(spec.num_experts), None)
    return SoftmaxGate(spec, weights, numerics or FastNumerics())(router_logits)


@pytest.mark.parametrize("numerics", NUMERICS, ids=["fast", "deterministic"])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(16, 4), (8, 8), (128, 8), (320, 1)])
def test_choice_of_the_softmax_gate_equals_the_plain_one(
    num_experts: int, num_chosen: int, norm_topk_prob: bool, numerics: Numerics
) -> None:
    spec = SoftmaxGateSpec(num_experts, num_chosen, norm_topk_prob)
    logits = 2.0 * normal(50, num_experts)
    choice = choose_by_softmax(spec, logits, numerics)
    plain = [plain_softmax_gate(spec, row) for row in logits.tolist()]
    assert choice.topk_ids.tolist() == [ids for ids, _ in plain]
    expected = torch.tensor([weights for _, weights in plain])
    torch.testing.assert_close(choice.topk_weights, expected, rtol=1e-5, atol=1e-6)
    assert choice.topk_weights.dtype == torch.float32
    assert not choice.poisoned.any()


def test_only_renormalised_weights_of_the_softmax_gate_sum_to_one() -> None:
    logits = normal(20, 16)
    sums = [
        choose_by_softmax(SoftmaxGateSpec(16, 4, norm_topk_prob), logits).topk_weights.sum(dim=-1)
        for norm_topk_prob in (True, False)
    ]
    torch.testing.assert_close(sums[0], torch.ones(20))
    assert bool((sums[1] < 0.95).all())


def test_in_bfloat16_logits_and_weights_of_the_softmax_gate_are_what_the_model_holds() -> None:
    logits = normal(20, 16)
    choice = choose_by_softmax(SoftmaxGateSpec(16, 4, True), logits.to(torch.bfloat16))
    weights = choice.topk_weights
    assert weights.dtype == torch.float32
    assert torch.equal(weights, weights.to(torch.bfloat16).to(torch.float32))
    expected = choose_by_softmax(
        SoftmaxGateSpec(16, 4, True), logits.to(torch.bfloat16).to(torch.float32)
    )
    assert torch.equal(choice.topk_ids, expected.topk_ids)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_rows_of_the_softmax_gate_are_reported_and_touch_no_other(bad: float) -> None:
    spec, clean = SoftmaxGateSpec(16, 4, True), normal(9, 16)
    logits = clean.clone()
    logits[4, 3] = bad
    weights = GateWeights(torch.eye(16), None)
    choice = SoftmaxGate(spec, weights, GivenLogits(logits))(clean)
    expected = choose_by_softmax(spec, clean)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert choice.poisoned.nonzero().flatten().tolist() == [4]
    assert torch.equal(choice.topk_ids[others], expected.topk_ids[others])
    assert torch.equal(choice.topk_weights[others], expected.topk_weights[others])
    assert len(set(choice.topk_ids[4].tolist())) == 4
    assert choice.topk_weights.isfinite().all()


class GivenLogits(FastNumerics):
    """Numerics whose products are the given router logits."""

    def __init__(self, router_logits: Tensor) -> None:
        self._router_logits = router_logits

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._router_logits
