import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.routes import RouteShape
from expert_workers.model.gate import GateChoice
from expert_workers.route_recorder import StepRoutes
from expert_workers.step_inputs import StepInputs
from expert_workers.stopwatch import Stopwatch

K = 2


class CountingGate:
    """Chooses experts (n, n + 1) in its n-th call; poisons the rows it is told to."""

    def __init__(self, poisoned_rows: list[int]) -> None:
        self.rows_seen: list[int] = []
        self._poisoned_rows = poisoned_rows

    def __call__(self, x: Tensor) -> GateChoice:
        first = len(self.rows_seen)
        self.rows_seen.append(x.shape[0])
        poisoned = torch.zeros(x.shape[0], dtype=torch.bool)
        poisoned[self._poisoned_rows] = True
        ids = torch.tensor([first, first + 1]).expand(x.shape[0], K)
        return GateChoice(ids, torch.full((x.shape[0], K), 0.5 + first), poisoned)


def make_inputs(num_gate_tokens: int, num_replay_tokens: int, num_layers: int = 3) -> StepInputs:
    num_tokens = num_gate_tokens + num_replay_tokens
    column = torch.arange(num_tokens)
    dims = (num_replay_tokens, num_layers, K)
    return StepInputs(
        input_ids=column,
        positions=column,
        slot_mapping=column,
        cu_seqlens_q=(0, num_tokens),
        seq_lens=(num_tokens,),
        block_tables=(column,),
        num_gate_tokens=num_gate_tokens,
        replay_topk_ids=torch.arange(num_replay_tokens * num_layers * K).view(dims) + 100,
        replay_topk_weights=torch.rand(dims, generator=torch.Generator().manual_seed(1)),
        last_token_indices=column[-1:],
    )


def run_layers(
    inputs: StepInputs, gate: CountingGate, num_experts: int = 256
) -> tuple[StepRoutes, list[tuple[Tensor, Tensor]]]:
    step_routes = StepRoutes(inputs, RouteShape(3, K, num_experts), Stopwatch())
    x = torch.zeros(inputs.num_tokens, 8)
    return step_routes, [step_routes.topk(layer, x, gate) for layer in range(3)]


def test_gate_sees_its_rows_only_and_the_rest_is_replayed() -> None:
    inputs, gate = make_inputs(3, 4), CountingGate([])
    _, layers = run_layers(inputs, gate)
    assert gate.rows_seen == [3, 3, 3]
    for layer, (ids, weights) in enumerate(layers):
        assert ids[:3].tolist() == [[layer, layer + 1]] * 3
        assert torch.equal(ids[3:], inputs.replay_topk_ids[:, layer])
        assert torch.equal(weights[3:], inputs.replay_topk_weights[:, layer])


def test_gate_is_not_called_when_every_token_replays() -> None:
    gate = CountingGate([])
    step_routes, layers = run_layers(make_inputs(0, 4), gate)
    assert gate.rows_seen == []
    assert [ids.shape for ids, _ in layers] == [(4, K)] * 3
    assert step_routes.recorded().num_tokens == 0


def test_rank_without_tokens_gets_empty_routes() -> None:
    _, layers = run_layers(make_inputs(0, 0), CountingGate([]))
    assert [(ids.shape, weights.shape) for ids, weights in layers] == [((0, K), (0, K))] * 3


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_only_the_gate_s_choices_are_recorded(num_experts: int, dtype: type) -> None:
    step_routes, _ = run_layers(make_inputs(3, 4), CountingGate([]), num_experts)
    routes = step_routes.recorded()
    assert routes.topk_ids.dtype == dtype
    assert routes.topk_ids.tolist() == [[[0, 1], [1, 2], [2, 3]]] * 3
    assert routes.topk_weights.dtype == np.float32
    assert routes.topk_weights[:, :, 0].tolist() == [[0.5, 1.5, 2.5]] * 3


def test_poisoned_rows_are_reported_by_token() -> None:
    step_routes, _ = run_layers(make_inputs(3, 4), CountingGate([1]))
    assert step_routes.poisoned_tokens().tolist() == [False, True] + [False] * 5


def test_gate_time_is_measured() -> None:
    stopwatch = Stopwatch()
    inputs = make_inputs(2, 0)
    step_routes = StepRoutes(inputs, RouteShape(3, K, 8), stopwatch)
    step_routes.topk(0, torch.zeros(2, 8), CountingGate([]))
    assert stopwatch.seconds("gate") > 0.0
