"""Routes that the API returned, replayed in transformers: a trainer has the server's experts and is closer to it."""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from expert_workers.route_replay.batch import BatchLayout
from expert_workers.route_replay.ranged_routes import decode_routes, routes_of_choice
from expert_workers.route_replay.replay import replay_routes
from tests.helpers.http_cell import MODEL, http_cell
from tests.helpers.oracle import load_reference
from tests.helpers.rollouts import Rollouts, difference, sampled_rollouts
from tests.helpers.states import random_prompt
from tests.helpers.tiny_checkpoints import SHAPE_VARIANTS, write_variant
from tests.helpers.trainers import gates, perturb_gates, token_logprobs

DOCUMENT = Path(__file__).parents[2] / "docs" / "route_replay.md"
PROMPTS = [random_prompt(length, seed=200 + length) for length in (5, 16, 33, 48)]


@dataclass(frozen=True)
class ServedModel:
    client: httpx.Client
    trainer: Any
    """The same checkpoint in transformers, float32; tests change copies."""
    rollouts: Rollouts


@pytest.fixture(scope="module", params=["qwen3", "plain"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedModel]:
    """Qwen3-MoE and DeepSeek-V3 on two ranks."""
    model_dir = tmp_path_factory.mktemp("models") / request.param
    write_variant(model_dir, SHAPE_VARIANTS[request.param], seed=4)
    with http_cell(model_dir, ep_size=2) as client:
        rollouts = sampled_rollouts(client, PROMPTS, 24)
        yield ServedModel(client, load_reference(model_dir), rollouts)


def test_with_the_servers_weights_a_trainer_says_what_the_server_said(served: ServedModel) -> None:
    assert difference(served.trainer, served.rollouts, "recorded").largest < 1e-4
    assert difference(served.trainer, served.rollouts, "recomputed").largest < 1e-4


def test_a_trainer_whose_gates_moved_is_closer_by_the_servers_experts(served: ServedModel) -> None:
    trainer = copy.deepcopy(served.trainer)
    perturb_gates(trainer, share=0.05)
    own = difference(trainer, served.rollouts, None)
    recomputed = difference(trainer, served.rollouts, "recomputed")
    recorded = difference(trainer, served.rollouts, "recorded")
    assert own.other_experts > 0.02
    assert (recomputed.other_experts, recorded.other_experts) == (0.0, 0.0)
    assert recomputed.mean < 0.95 * own.mean
    assert recorded.largest < 1e-4  # nothing but gates has moved


def test_a_trainer_in_bfloat16_takes_the_servers_experts(served: ServedModel) -> None:
    trainer = copy.deepcopy(served.trainer).to(torch.bfloat16)
    own = difference(trainer, served.rollouts, None)
    recorded = difference(trainer, served.rollouts, "recorded")
    assert own.other_experts > 0.0
    assert recorded.other_experts == 0.0
    assert recorded.mean < own.mean


def documented_functions() -> dict[str, Any]:
    """What the document's code defines."""
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text("utf-8"), re.M | re.S):
        exec(compile(code, str(DOCUMENT), "exec"), names)
    return names


def test_the_documented_steps_train_by_the_servers_experts(served: ServedModel) -> None:
    documented = documented_functions()
    trainer = copy.deepcopy(served.trainer).train()
    trainer.activation_checkpointing_enable()
    before = [gate.weight.detach().clone() for gate in gates(trainer)]
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.05)
    answer = documented["rollouts"](served.client, MODEL, PROMPTS[2])
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    first = documented["training_step"](trainer, optimizer, answer, advantages)
    assert len(first) == sum(len(choice["token_ids"]) for choice in answer["choices"])
    torch.testing.assert_close(first, torch.ones_like(first), rtol=0.0, atol=1e-3)
    second = documented["training_step"](trainer, optimizer, answer, advantages)
    assert torch.isfinite(second).all()
    assert not torch.allclose(second, first, atol=1e-3)
    for weight, gate in zip(before, gates(trainer), strict=True):
        assert not torch.equal(gate.weight, weight)
    for parameter in trainer.parameters():
        assert torch.isfinite(parameter).all()


def gradients_of(trainer: Any) -> list[Tensor]:
    return [parameter.grad for parameter in trainer.parameters()]


def policy_gradient(trainer: Any, answer: Any, advantages: Tensor) -> list[Tensor]:
    """Of all parameters, where every ratio is 1: sequence by sequence, so that nothing is padded."""
    prompt, choices = answer["prompt_token_ids"], answer["choices"]
    num_tokens = sum(len(choice["token_ids"]) for choice in choices)
    trainer.zero_grad()
    for choice, advantage in zip(choices, advantages, strict=True):
        ids = torch.tensor([prompt + choice["token_ids"]])
        mask = torch.ones_like(ids)
        routes = [routes_of_choice(answer, choice["index"])]
        layout = BatchLayout.padded(mask)
        with replay_routes(trainer, layout, routes, topk_weights="recomputed"):
            logprobs = token_logprobs(trainer, ids, mask)[0, len(prompt) - 1 :]
            (-advantage * logprobs.sum() / num_tokens).backward()
    return gradients_of(trainer)


def test_the_first_documented_step_has_ratios_of_one_and_the_policy_gradient(
    served: ServedModel,
) -> None:
    documented, trainer = documented_functions(), copy.deepcopy(served.trainer)
    answer = documented["rollouts"](served.client, MODEL, PROMPTS[2])
    advantages = torch.tensor([1.0, 2.0, 0.5, -0.5])
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.0)
    found: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: found.extend(gradients_of(trainer)))
    ratios = documented["training_step"](trainer, optimizer, answer, advantages)
    torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0.0, atol=1e-3)
    expected = policy_gradient(trainer, answer, advantages)
    for gradient, known in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, known, rtol=1e-2, atol=1e-5)


def test_what_is_recorded_as_documented_is_what_the_server_returned(served: ServedModel) -> None:
    documented, rollouts = documented_functions(), served.rollouts
    recorded = documented["recorded_routes"](
        served.trainer, rollouts.input_ids, rollouts.attention_mask
    )
    for mine, theirs in zip(recorded, rollouts.routes, strict=True):
        read = decode_routes(documented["as_json"](mine))
        assert read.topk_ids.dtype == theirs.topk_ids.dtype
        assert (read.topk_ids[: theirs.end] == theirs.topk_ids).all()
        assert abs(read.topk_weights[: theirs.end] - theirs.topk_weights).max() < 1e-5
