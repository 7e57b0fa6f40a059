from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.routes import ExpertRoutes
from expert_workers.dispatch.base import DispatchedTokens
from expert_workers.dispatch.local import LocalDispatcher
from expert_workers.model.numerics import DeterministicNumerics, FastNumerics, Numerics
from expert_workers.route_recorder import StepRoutes
from expert_workers.stopwatch import Stopwatch
from tests.helpers.model_runner import CPU, Chunk, ModelRunner, prompt_tokens
from tests.helpers.tiny_checkpoints import SHAPE_VARIANTS, write_tiny_checkpoint, write_variant

NUMERICS = [FastNumerics(), DeterministicNumerics()]
NAMES = ["fast", "deterministic"]
BAD_TOKEN = 77


class CountingDispatcher:
    """A local dispatcher that notes the rows of every call."""

    def __init__(self, inner: LocalDispatcher) -> None:
        self.calls: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        self._inner = inner

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, positions: Tensor
    ) -> DispatchedTokens:
        assert topk_ids.shape == topk_weights.shape == (x.shape[0], 4)
        assert positions.shape == x.shape[:1]
        self.calls.append(("dispatch", tuple(x.shape), x.dtype))
        return self._inner.dispatch(x, topk_ids, topk_weights, positions)

    def combine(self, y: Tensor, handle: object) -> Tensor:
        self.calls.append(("combine", tuple(y.shape), y.dtype))
        return self._inner.combine(y, handle)


@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
@pytest.mark.parametrize("name", ["plain", "qwen3"])
def test_rank_without_tokens_still_takes_part_in_every_exchange(
    tmp_path: Path, name: str, numerics: Numerics
) -> None:
    runner = ModelRunner(write_variant(tmp_path, SHAPE_VARIANTS[name], seed=1), numerics)
    inputs = runner.step_inputs([])
    dispatcher = CountingDispatcher(LocalDispatcher(runner.placement, CPU))
    step_routes = StepRoutes(inputs, runner.spec.route_shape, Stopwatch())
    logits = runner.transformer.forward(
        inputs, runner.kv_pool, step_routes, dispatcher, Stopwatch()
    )
    assert logits.shape == (0, 3072)
    empty = ((0, 64), torch.float32)
    assert dispatcher.calls == [("dispatch", *empty), ("combine", *empty)] * 2
    assert step_routes.recorded().num_tokens == 0


@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
def test_logits_come_for_the_asked_tokens_in_their_order(
    tmp_path: Path, numerics: Numerics
) -> None:
    runner = ModelRunner(write_tiny_checkpoint(tmp_path, seed=1), numerics)
    inputs = runner.step_inputs([Chunk(0, prompt_tokens(20, seed=1))])
    whole = runner.step([Chunk(0, prompt_tokens(20, seed=1))]).logits
    asked = replace(inputs, last_token_indices=torch.tensor([4, 5, 11, 19]))
    logits = runner.transformer.forward(
        asked,
        runner.kv_pool,
        StepRoutes(asked, runner.spec.route_shape, Stopwatch()),
        LocalDispatcher(runner.placement, CPU),
        Stopwatch(),
    )
    torch.testing.assert_close(logits, whole[[4, 5, 11, 19]], rtol=1e-5, atol=1e-4)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
def test_a_poisoned_sequence_is_reported_and_leaves_its_neighbours_alone(
    tmp_path: Path, numerics: Numerics
) -> None:
    runner = ModelRunner(write_tiny_checkpoint(tmp_path, seed=1), numerics, num_seqs=3)
    healthy = [Chunk(0, prompt_tokens(30, seed=1)), Chunk(2, prompt_tokens(9, seed=2))]
    sick = Chunk(1, [5, 6, 7, BAD_TOKEN])
    assert not set(healthy[0].token_ids + healthy[1].token_ids) & set(sick.token_ids)
    clean = runner.step([healthy[0], sick, healthy[1]])
    embedding = runner.weights.embedding.clone()
    embedding[BAD_TOKEN] = torch.nan
    runner.use_weights(replace(runner.weights, embedding=embedding))
    poisoned = runner.step([healthy[0], sick, healthy[1]])
    assert poisoned.poisoned[33]
    assert not poisoned.poisoned[:30].any()
    assert not poisoned.poisoned[34:].any()
    healthy_rows = [*range(30), *range(34, 43)]
    torch.testing.assert_close(
        poisoned.logits[healthy_rows], clean.logits[healthy_rows], rtol=1e-5, atol=1e-4
    )
    assert not poisoned.logits[33].isfinite().any()


def test_blocks_of_a_poisoned_sequence_can_be_used_again(tmp_path: Path) -> None:
    runner = ModelRunner(write_tiny_checkpoint(tmp_path, seed=1), FastNumerics())
    clean = runner.step([Chunk(0, prompt_tokens(10, seed=1))]).logits
    runner.kv_pool.rows.fill_(torch.nan)
    assert torch.equal(runner.step([Chunk(0, prompt_tokens(10, seed=1))]).logits, clean)


def test_mixed_steps_of_gate_and_replay_record_the_gate_s_tokens_only(tmp_path: Path) -> None:
    runner = ModelRunner(write_tiny_checkpoint(tmp_path, seed=1), FastNumerics(), num_seqs=2)
    prompt = prompt_tokens(24, seed=1)
    first = runner.step([Chunk(0, prompt)])
    mixed = runner.step([Chunk(0, prompt[:7]), Chunk(1, prompt, replay=first.routes)])
    assert mixed.routes.num_tokens == 7
    assert mixed.routes.same_ids(first.routes.slice(0, 7))
    torch.testing.assert_close(mixed.logits[7:], first.logits, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["plain", "qwen3"])
def test_bfloat16_runs_and_stays_near_float32(tmp_path: Path, name: str) -> None:
    write_variant(tmp_path, SHAPE_VARIANTS[name], seed=1)
    wide = ModelRunner(tmp_path, FastNumerics())
    narrow = ModelRunner(tmp_path, FastNumerics(), dtype=torch.bfloat16)
    prompt = prompt_tokens(40, seed=1)
    expected = wide.step([Chunk(0, prompt)])
    replay = ExpertRoutes(expected.routes.topk_ids, expected.routes.topk_weights)
    logits = narrow.step([Chunk(0, prompt, replay=replay)]).logits
    assert logits.dtype == torch.float32
    error = (logits - expected.logits).abs().mean() / expected.logits.abs().mean()
    assert float(error) < 0.05
