"""What a cell answers is what transformers computes: greedy generations, injected routes, every shape of model."""

from pathlib import Path

import pytest
import torch

from tests.helpers.equality import LOGIT_TOLERANCE, ReferenceModel
from tests.helpers.laboratory import DEMO, Case, Laboratory
from tests.helpers.states import State, observed_ranks, random_prompt, run_injected
from tests.helpers.tiny_checkpoints import (
    DEMO_MODEL_DIR,
    QWEN3_VARIANTS,
    SHAPE_VARIANTS,
    TINY_CONFIG,
    CheckpointForm,
    write_tiny_checkpoint,
)

RUN_ON_RANKS = [
    *(name for name in SHAPE_VARIANTS if name not in QWEN3_VARIANTS),
    *("qwen3_one_kv_head", "qwen3_as_many_kv_heads", "qwen3_sparse_step", "qwen3_320_experts"),
]


@pytest.fixture(scope="module", params=RUN_ON_RANKS)
def model(request: pytest.FixtureRequest) -> str:
    """All tests of one come together, so that its ranks start once."""
    name: str = request.param
    return name


@pytest.mark.parametrize("state", ["replay", "mixed"])
def test_every_shape_agrees_on_two_ranks(laboratory: Laboratory, model: str, state: State) -> None:
    case = Case(model, 2, state, 16, (70,))
    assert laboratory.outcome(case).comparison.failures == ()


def test_every_shape_keeps_its_bytes_on_two_ranks(laboratory: Laboratory, model: str) -> None:
    assert laboratory.outcome(Case(model, 2, "mixed", 16, (70,))).byte_differences == ()


def test_with_the_references_routes_every_logit_is_the_references(
    laboratory: Laboratory, model: str
) -> None:
    assert_logits_with_the_references_routes(laboratory, model)


def test_with_the_references_routes_every_logit_of_the_demo_is_the_references(
    laboratory: Laboratory,
) -> None:
    assert_logits_with_the_references_routes(laboratory, DEMO)


def assert_logits_with_the_references_routes(laboratory: Laboratory, model: str) -> None:
    prompt = random_prompt(160, seed=110)
    reference = laboratory.reference(model).pass_of(prompt)
    ranks = laboratory.ranks(Case(model, 2, "injected", 64, ()))
    (run,) = run_injected(ranks, 64, [prompt], [reference.routes], 1)
    difference = (torch.from_numpy(run.logits()) - reference.logits).abs().max()
    assert float(difference) < LOGIT_TOLERANCE


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "fast"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_free_running_generations_say_what_transformers_says(
    ep_size: int, deterministic: bool
) -> None:
    reference = ReferenceModel(DEMO_MODEL_DIR)
    prompts = [random_prompt(length, seed=120 + length) for length in (1, 16, 40, 100)]
    with observed_ranks(DEMO_MODEL_DIR, ep_size=ep_size, deterministic=deterministic) as observed:
        bench = observed.bench(budget=32)
        seq_ids = [bench.submit(prompt, 32) for prompt in prompts]
        bench.finish()
    runs = [bench.run_of(seq_id) for seq_id in seq_ids]
    assert [reference.first_other_token(run) for run in runs] == [None] * len(prompts)


@pytest.mark.parametrize("bias", [-5.0, 5.0])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_group_limited_gates_agree_under_a_large_bias(
    tmp_path: Path, bias: float, ep_size: int
) -> None:
    biases = {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias": torch.full((16,), bias)
        for layer in range(TINY_CONFIG["first_k_dense_replace"], TINY_CONFIG["num_hidden_layers"])
    }
    write_tiny_checkpoint(tmp_path, seed=6, form=CheckpointForm(extra_tensors=biases))
    with observed_ranks(tmp_path, ep_size=ep_size) as observed:
        run = observed.bench(budget=32).generate(random_prompt(100, seed=130), 16)
    assert ReferenceModel(tmp_path).compare(run).failures == ()
