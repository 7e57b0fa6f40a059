"""The decoder against Hugging Face transformers on the same checkpoint, in float32."""

from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from cluster.model_spec import SigmoidGateSpec, SoftmaxGateSpec
from expert_workers.model.gate import SigmoidGate, SoftmaxGate
from expert_workers.model.numerics import DeterministicNumerics, FastNumerics, Numerics
from expert_workers.model.weights import GateWeights
from tests.helpers.model_runner import Chunk, ModelRunner, StepOutcome, prompt_tokens
from tests.helpers.oracle import (
    Reference,
    compare_routes,
    load_reference,
    reference_greedy,
    reference_pass,
)
from tests.helpers.tiny_checkpoints import (
    DEMO_MODEL_DIR,
    QWEN3_CONFIG,
    SHAPE_VARIANTS,
    TINY_CONFIG,
    CheckpointForm,
    write_tiny_checkpoint,
    write_variant,
)

NUMERICS = [FastNumerics(), DeterministicNumerics()]
NAMES = ["fast", "deterministic"]
LOGIT_TOLERANCE = 1e-4
ROUTE_MARGIN = 1e-5


def assert_same_decisions(outcome: StepOutcome, reference: Reference, num_tokens: int) -> None:
    """Logits within the tolerance; greedy tokens equal, unless the reference itself is undecided within it."""
    logits, expected = outcome.logits[:num_tokens], reference.logits[:num_tokens]
    assert float((logits - expected).abs().max()) < LOGIT_TOLERANCE
    best_two = expected.topk(2, dim=-1).values
    clear = best_two[:, 0] - best_two[:, 1] >= LOGIT_TOLERANCE
    assert clear.float().mean() > 0.99
    assert torch.equal(logits[clear].argmax(dim=-1), expected[clear].argmax(dim=-1))


def check_against_reference(model_dir: Path, numerics: Numerics, token_ids: list[int]) -> None:
    """With the reference's routes; and with the own gate, which may differ only where the reference is undecided."""
    reference = reference_pass(load_reference(model_dir), token_ids)
    runner = ModelRunner(model_dir, numerics, num_seqs=2)
    replayed = runner.step([Chunk(0, token_ids, replay=reference.routes)])
    assert_same_decisions(replayed, reference, len(token_ids))
    own = runner.step([Chunk(1, token_ids)])
    agreement = compare_routes(own.routes, reference)
    assert agreement.num_tokens == len(token_ids) or agreement.margin < ROUTE_MARGIN
    assert_same_decisions(own, reference, agreement.num_tokens)
    torch.testing.assert_close(
        torch.from_numpy(own.routes.topk_weights[: agreement.num_tokens]),
        torch.from_numpy(reference.routes.topk_weights[: agreement.num_tokens]),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
def test_demo_model_agrees_over_a_long_prompt(numerics: Numerics) -> None:
    check_against_reference(DEMO_MODEL_DIR, numerics, prompt_tokens(1000, seed=21))


@pytest.mark.parametrize("name", SHAPE_VARIANTS)
@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
def test_every_shape_agrees(tmp_path: Path, name: str, numerics: Numerics) -> None:
    write_variant(tmp_path, SHAPE_VARIANTS[name], seed=4)
    check_against_reference(tmp_path, numerics, prompt_tokens(120, seed=22))


@pytest.mark.parametrize("name", ["plain", "yarn", "qwen3", "qwen3_yarn"])
def test_hub_spelling_in_shards_and_bfloat16_agrees(tmp_path: Path, name: str) -> None:
    form = CheckpointForm(hub_spelling=True, num_shards=3, dtype=torch.bfloat16)
    write_variant(tmp_path, SHAPE_VARIANTS[name], seed=4, form=form)
    check_against_reference(tmp_path, FastNumerics(), prompt_tokens(120, seed=23))


GATE_SETTINGS = {
    f"{config['model_type']}, {'shares' if norm else 'raw'}, times {scale}": (config, norm, scale)
    for config, scales in ((TINY_CONFIG, (1.0, 2.5)), (QWEN3_CONFIG, (1.0,)))
    for norm in (True, False)
    for scale in scales
}


@pytest.mark.parametrize("name", GATE_SETTINGS)
@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
def test_every_setting_of_a_gate_agrees_by_the_gate_and_replayed(
    tmp_path: Path, name: str, numerics: Numerics
) -> None:
    config, norm_topk_prob, scale = GATE_SETTINGS[name]
    settings: dict[str, object] = {"norm_topk_prob": norm_topk_prob}
    if config is TINY_CONFIG:
        settings["routed_scaling_factor"] = scale
    write_variant(tmp_path, config | settings, seed=6)
    token_ids = prompt_tokens(120, seed=26)
    check_against_reference(tmp_path, numerics, token_ids)
    runner = ModelRunner(tmp_path, numerics, num_seqs=2)
    own = runner.step([Chunk(0, token_ids)])
    sums = torch.from_numpy(own.routes.topk_weights).sum(dim=-1)
    as_shares = torch.full_like(sums, scale)
    assert torch.allclose(sums, as_shares, rtol=1e-5) == norm_topk_prob
    replayed = runner.step([Chunk(1, token_ids, replay=own.routes)])
    assert torch.equal(replayed.logits, own.logits)  # what is recorded is what was applied


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0])
def test_the_sigmoid_gate_chooses_and_weighs_as_transformers_does_whatever_the_bias(
    shift: float, norm_topk_prob: bool, scale: float
) -> None:
    spec = SigmoidGateSpec(32, 6, 8, 2, norm_topk_prob, scale)
    router = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=32,
            n_routed_experts=spec.num_experts,
            num_experts_per_tok=spec.num_experts_per_tok,
            n_group=spec.num_groups,
            topk_group=spec.topk_group,
            norm_topk_prob=norm_topk_prob,
            routed_scaling_factor=scale,
        )
    )
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(60, 32, generator=draw)
    bias = shift + 0.3 * torch.randn(32, generator=draw)
    with torch.no_grad():
        router.weight.copy_(torch.eye(32))
        router.e_score_correction_bias.copy_(bias)
        _, weights, ids = router(x)
    choice = SigmoidGate(spec, GateWeights(torch.eye(32), bias), FastNumerics())(x)
    ids, order = ids.sort(dim=-1)
    assert torch.equal(choice.topk_ids, ids)
    torch.testing.assert_close(choice.topk_weights, weights.gather(-1, order), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_softmax_gate_rounds_where_transformers_does(
    dtype: torch.dtype, norm_topk_prob: bool
) -> None:
    config = Qwen3MoeConfig(
        hidden_size=32, num_experts=32, num_experts_per_tok=6, norm_topk_prob=norm_topk_prob
    )
    router = Qwen3MoeTopKRouter(config).to(dtype)
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.no_grad():
        router.weight.copy_(torch.eye(32))
        _, weights, ids = router(x)
    spec = SoftmaxGateSpec(32, 6, norm_topk_prob)
    choice = SoftmaxGate(spec, GateWeights(torch.eye(32), None), FastNumerics())(x)
    ids, order = ids.sort(dim=-1)
    assert torch.equal(choice.topk_ids, ids)
    expected = weights.gather(-1, order).to(torch.float32)
    torch.testing.assert_close(choice.topk_weights, expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", ["plain", "qwen3_as_many_kv_heads"])
def test_experts_stacked_in_one_tensor_agree(tmp_path: Path, name: str) -> None:
    form = CheckpointForm(stacked_experts=True, num_shards=2)
    write_variant(tmp_path, SHAPE_VARIANTS[name], seed=4, form=form)
    check_against_reference(tmp_path, FastNumerics(), prompt_tokens(120, seed=25))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_model_without_shared_experts_agrees(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, seed=4, n_shared_experts=0)
    check_against_reference(tmp_path, FastNumerics(), prompt_tokens(120, seed=24))


@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
@pytest.mark.parametrize("seed", [1, 2])
def test_greedy_decoding_says_what_transformers_says(numerics: Numerics, seed: int) -> None:
    prompt = prompt_tokens(40, seed=seed)
    expected = reference_greedy(load_reference(DEMO_MODEL_DIR), prompt, 24)
    runner = ModelRunner(DEMO_MODEL_DIR, numerics)
    logits = runner.step([Chunk(0, prompt)]).logits
    generated = [int(logits[-1].argmax())]
    while len(generated) < 24:
        chunk = Chunk(0, generated[-1:], len(prompt) + len(generated) - 1)
        generated.append(int(runner.step([chunk]).logits[-1].argmax()))
    assert generated == expected
