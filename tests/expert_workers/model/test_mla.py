from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cluster.model_spec import MlaSpec
from expert_workers.model.attention import AttentionPlan
from expert_workers.model.checkpoint import SINGLE_FILE
from expert_workers.model.mla import MlaAttention
from expert_workers.model.numerics import DeterministicNumerics, FastNumerics, Numerics
from expert_workers.model.rotary import RotaryTable, rotary_frequencies
from expert_workers.model.weights import MlaWeights
from tests.helpers.model_runner import Chunk, ModelRunner
from tests.helpers.tiny_checkpoints import write_tiny_checkpoint
from tests.reference.naive_attention import naive_mla


@pytest.mark.parametrize(
    "numerics", [FastNumerics(), DeterministicNumerics()], ids=["fast", "deterministic"]
)
@pytest.mark.parametrize("q_lora_rank", [32, None])
def test_absorbed_form_equals_the_expanded_one(
    tmp_path: Path, numerics: Numerics, q_lora_rank: int | None
) -> None:
    write_tiny_checkpoint(tmp_path, seed=5, q_lora_rank=q_lora_rank)
    runner = ModelRunner(tmp_path, numerics)
    spec, weights = runner.spec.attention, runner.weights.layers[0].attention
    x = torch.randn(90, runner.spec.hidden_size, generator=torch.Generator().manual_seed(6))
    assert isinstance(spec, MlaSpec)
    assert isinstance(weights, MlaWeights)
    inputs = runner.step_inputs([Chunk(0, [3] * 90)])
    table = RotaryTable(rotary_frequencies(spec.rope), 1.0, 90)
    rotation = table.at(inputs.positions, torch.float32)
    plan = AttentionPlan.of(inputs, rotation, runner.kv_pool.block_size)
    attended = MlaAttention(spec, weights, numerics)(x, plan, runner.kv_pool, 0)

    query = x
    if weights.q_a is not None and weights.q_a_norm is not None:
        query = numerics.rms_norm(x @ weights.q_a.T, weights.q_a_norm, 1e-6)
    query = (query @ weights.q_b.T).view(90, spec.num_heads, -1)
    rotated = rotation.apply(query[..., spec.qk_nope_head_dim :], interleaved=True)
    query = torch.cat([query[..., : spec.qk_nope_head_dim], rotated], dim=-1) * 24**-0.5
    latents, keys = runner.kv_rows(0, 90)[0].split([32, 8], dim=-1)
    with safe_open(tmp_path / SINGLE_FILE, framework="pt") as file:
        kv_b = file.get_tensor("model.layers.0.self_attn.kv_b_proj.weight").view(4, 32, 32)
    heads = naive_mla(query, latents, keys, kv_b, spec.qk_nope_head_dim)
    expected = heads.flatten(1).to(torch.float32) @ weights.output.T
    torch.testing.assert_close(attended, expected, rtol=1e-4, atol=1e-5)
