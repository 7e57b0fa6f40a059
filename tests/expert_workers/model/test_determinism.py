"""Deterministic mode: the same bytes for a token however its step is composed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.routes import ExpertRoutes
from expert_workers.model.numerics import DeterministicNumerics, FastNumerics
from expert_workers.model.weights import LayerWeights, ModelWeights, MoeWeights
from tests.helpers.model_runner import Chunk, ModelRunner, StepOutcome, prompt_tokens
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR, SHAPE_VARIANTS, write_variant

PROMPT = prompt_tokens(600, seed=11)


FAMILIES = ["demo", "qwen3"]


def model_of(directory: Path, name: str) -> Path:
    if name == "demo":
        return DEMO_MODEL_DIR
    return write_variant(directory, SHAPE_VARIANTS[name], seed=2)


def chunked(runner: ModelRunner, token_ids: list[int], size: int) -> list[StepOutcome]:
    """Sequence 1, one step per chunk."""
    return [
        runner.step([Chunk(1, token_ids[start : start + size], start)])
        for start in range(0, len(token_ids), size)
    ]


def joined(outcomes: list[StepOutcome], runner: ModelRunner) -> tuple[bytes, bytes, bytes]:
    """Bytes of logits, expert ids and weights."""
    routes = ExpertRoutes.concatenate([o.routes for o in outcomes], runner.spec.route_shape)
    logits = torch.cat([outcome.logits for outcome in outcomes])
    return logits.numpy().tobytes(), routes.topk_ids.tobytes(), routes.topk_weights.tobytes()


def kv_bytes(runner: ModelRunner, seq: int, num_tokens: int) -> bytes:
    return runner.kv_rows(seq, num_tokens).numpy().tobytes()


def with_nan_gates(weights: ModelWeights) -> ModelWeights:
    return replace(weights, layers=tuple(_with_nan_gate(layer) for layer in weights.layers))


def _with_nan_gate(layer: LayerWeights) -> LayerWeights:
    if not isinstance(layer.feed_forward, MoeWeights):
        return layer
    gate = layer.feed_forward.gate
    broken = replace(gate, weight=torch.full_like(gate.weight, torch.nan))
    return replace(layer, feed_forward=replace(layer.feed_forward, gate=broken))


@pytest.mark.parametrize("size", [1, 7, 16, 512])
def test_chunks_of_any_size_give_the_bytes_of_the_whole_prompt(size: int) -> None:
    runner = ModelRunner(DEMO_MODEL_DIR, DeterministicNumerics(), num_seqs=2)
    whole = joined([runner.step([Chunk(0, PROMPT)])], runner)
    assert joined(chunked(runner, PROMPT, size), runner) == whole
    assert kv_bytes(runner, 1, len(PROMPT)) == kv_bytes(runner, 0, len(PROMPT))


@pytest.mark.parametrize("name", SHAPE_VARIANTS)
def test_every_shape_gives_the_same_bytes_in_chunks_and_replayed(tmp_path: Path, name: str) -> None:
    write_variant(tmp_path, SHAPE_VARIANTS[name], seed=2)
    runner = ModelRunner(tmp_path, DeterministicNumerics(), num_seqs=3)
    prompt = PROMPT[:150]
    first = runner.step([Chunk(0, prompt)])
    for size in (1, 7, 70):
        assert joined(chunked(runner, prompt, size), runner) == joined([first], runner)
    replayed = runner.step([Chunk(2, prompt, replay=first.routes)])
    assert torch.equal(replayed.logits, first.logits)
    assert kv_bytes(runner, 2, 150) == kv_bytes(runner, 1, 150) == kv_bytes(runner, 0, 150)


@pytest.mark.parametrize("name", FAMILIES)
def test_neighbours_in_a_step_change_nothing(tmp_path: Path, name: str) -> None:
    """Six decodes of different lengths, a prefill and a replay together, and each of them alone."""
    runner = ModelRunner(model_of(tmp_path, name), DeterministicNumerics(), num_seqs=8)
    lengths = [1, 40, 64, 65, 300, 599]
    for seq, length in enumerate(lengths):
        runner.step([Chunk(seq, PROMPT[:length])])
    recorded = runner.step([Chunk(7, PROMPT[:200])]).routes
    chunks = [Chunk(seq, PROMPT[n : n + 1], n) for seq, n in enumerate(lengths)]
    chunks += [Chunk(6, PROMPT[:33]), Chunk(7, PROMPT[:200], replay=recorded)]
    alone = [runner.step([chunk]) for chunk in chunks]
    together = runner.step(chunks)
    assert torch.equal(together.logits, torch.cat([outcome.logits for outcome in alone]))
    assert joined([together], runner)[1:] == joined(alone, runner)[1:]


@pytest.mark.parametrize("name", FAMILIES)
def test_replay_computes_no_gate_and_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    runner = ModelRunner(model_of(tmp_path, name), DeterministicNumerics(), num_seqs=3)
    first = runner.step([Chunk(0, PROMPT)])
    runner.use_weights(with_nan_gates(runner.weights))
    replayed = runner.step([Chunk(1, PROMPT, replay=first.routes)])
    assert torch.equal(replayed.logits, first.logits)
    assert kv_bytes(runner, 1, len(PROMPT)) == kv_bytes(runner, 0, len(PROMPT))
    assert not replayed.poisoned.any()
    assert replayed.stopwatch.seconds("gate") == 0.0
    assert runner.step([Chunk(2, PROMPT[:5])]).poisoned.all()


def test_one_altered_expert_changes_the_logits() -> None:
    runner = ModelRunner(DEMO_MODEL_DIR, DeterministicNumerics(), num_seqs=2)
    first = runner.step([Chunk(0, PROMPT[:50])])
    ids = first.routes.topk_ids.copy()
    spare = next(e for e in range(64) if e not in ids[20, 2])
    ids[20, 2] = np.sort(np.append(ids[20, 2, 1:], spare))
    altered = ExpertRoutes(ids, first.routes.topk_weights)
    replayed = runner.step([Chunk(1, PROMPT[:50], replay=altered)])
    assert torch.equal(replayed.logits[:20], first.logits[:20])
    assert not torch.equal(replayed.logits[20:], first.logits[20:])


def test_fast_numerics_do_not_keep_this_promise() -> None:
    """Guards the tests above: they would notice the difference."""
    runner = ModelRunner(DEMO_MODEL_DIR, FastNumerics(), num_seqs=2)
    whole = joined([runner.step([Chunk(0, PROMPT[:100])])], runner)
    assert joined(chunked(runner, PROMPT[:100], 1), runner) != whole
