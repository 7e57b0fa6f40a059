"""Route replay where torch spreads a trainer over processes: gradients are those of one process with all sequences."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from expert_workers.route_replay.batch import BatchLayout
from expert_workers.route_replay.ranged_routes import RangedRoutes
from expert_workers.route_replay.recording import record_routes
from expert_workers.route_replay.replay import WeightsFrom, replay_routes
from tests.helpers.ranks import RankContext, run_ranks
from tests.helpers.trainers import gates, perturb_gates, tiny_trainer

NUM_RANKS = 2
WEIGHTS: tuple[WeightsFrom, ...] = ("recomputed", "recorded")
SEQUENCES = torch.from_numpy(np.random.default_rng(3).integers(3, 256, (NUM_RANKS, 17)))
"""One per rank, all of whose tokens have routes."""
LAYOUT = BatchLayout.padded(torch.ones(1, 17))


def routes_of(model: Any, ids: Tensor) -> list[RangedRoutes]:
    with torch.no_grad(), record_routes(model) as recording:
        model(ids, use_cache=False)
    return list(recording.routes(LAYOUT))


def backward(model: Any, ids: Tensor, routes: list[RangedRoutes], mode: WeightsFrom) -> None:
    with replay_routes(model, LAYOUT, routes, topk_weights=mode):
        model(ids, use_cache=False).logits.square().mean().backward()


def expected_gradients(
    model: Any, routes: list[list[RangedRoutes]], mode: WeightsFrom
) -> dict[str, Tensor]:
    """Mean over the sequences, in one process."""
    alone = copy.deepcopy(model)
    for row, ids in enumerate(SEQUENCES):
        backward(alone, ids[None], routes[row], mode)
    return {name: p.grad / NUM_RANKS for name, p in alone.named_parameters()}


def num_hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def with_ddp(model: Any) -> Any:
    return DistributedDataParallel(model)


def with_fsdp2(model: Any) -> Any:
    """Layers, and every gate by itself: its weights are there only while it runs."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model.activation_checkpointing_enable({"use_reentrant": False})
    for part in (*gates(model), *model.model.layers, model):
        fully_shard(part, mesh=mesh)
    return model


@pytest.mark.parametrize("sharded", [with_ddp, with_fsdp2])
def test_gradients_are_those_of_one_process_in_every_step(sharded: Any) -> None:
    model = tiny_trainer("qwen3_moe")
    routes = [routes_of(model, ids[None]) for ids in SEQUENCES]
    perturb_gates(model, share=0.05)
    model.train()
    expected = {mode: expected_gradients(model, routes, mode) for mode in WEIGHTS}

    def train(context: RankContext) -> list[str]:
        context.exchange()
        spread = sharded(copy.deepcopy(model))
        hooks = num_hooks(spread)
        ids = SEQUENCES[context.rank][None]
        wrong = []
        for mode in (*WEIGHTS, *WEIGHTS[::-1]):
            spread.zero_grad()
            backward(spread, ids, routes[context.rank], mode)
            for name, parameter in spread.named_parameters():
                gradient = whole(parameter.grad)
                if not torch.allclose(gradient, expected[mode][name.removeprefix("module.")]):
                    wrong.append(f"{mode}: {name}")
        assert num_hooks(spread) == hooks
        return wrong

    assert run_ranks(NUM_RANKS, train) == [[], []]


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
