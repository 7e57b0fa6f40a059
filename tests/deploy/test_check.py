"""`pointsman check`: sizes per rank and per token, of whole models and of a config alone, on hosts of any size."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.config import load_config
from deploy.cell_plan import CellPlan
from deploy.check import describe
from deploy.cli import main
from deploy.host_fit import Host, shortfalls
from deploy.planning import DEMO_MODEL, CellPreview, plan_cell, preview_cell
from tests.cluster.test_qwen3_config import (
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
    SHARED_BY_PUBLIC_MODELS,
)
from tests.helpers.tiny_checkpoints import SHAPE_VARIANTS, write_json, write_variant

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN3_30B = SHARED_BY_PUBLIC_MODELS | QWEN3_30B_A3B
QWEN3_235B = SHARED_BY_PUBLIC_MODELS | QWEN3_235B_A22B


def config_alone(directory: Path, config: dict[str, Any]) -> Path:
    write_json(directory / "config.json", config)
    return directory


def preview(model_dir: Path | str = "", **cell: Any) -> CellPreview:
    settings = {f"cell.{key}": value for key, value in cell.items()}
    return preview_cell(load_config(None, {"model.dir": str(model_dir)} | settings))


def row_of(description: dict[str, Any], dtype: str) -> dict[str, Any]:
    (row,) = [row for row in description["per_token"] if row["dtype"] == dtype]
    return row


# --- a config alone


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [(DEEPSEEK_V3, 671.0e9), (QWEN3_235B, 235.1e9), (QWEN3_30B, 30.5e9)],
    ids=["DeepSeek-V3", "Qwen3-235B-A22B", "Qwen3-30B-A3B"],
)
def test_a_config_alone_tells_the_size_of_a_public_model(
    tmp_path: Path, config: dict[str, Any], num_parameters: float
) -> None:
    described = describe(preview(config_alone(tmp_path, config), ep_size=8))
    assert described["checkpoint_bytes"] / 2 == pytest.approx(num_parameters, rel=2e-3)
    assert not described["tensors_checked"]
    assert not described["tokenizer_checked"]


@pytest.mark.parametrize(
    ("config", "kv", "stored", "applied", "percent_stored", "percent_applied"),
    [
        (DEEPSEEK_V3, 61 * 576 * 2, 58 * 8 * 5, 58 * 8 * 5, 3.30, 3.30),
        (QWEN3_235B, 94 * 1024 * 2, 94 * 8 * 5, 94 * 8 * 3, 1.95, 1.17),
        (QWEN3_30B, 48 * 1024 * 2, 48 * 8 * 5, 48 * 8 * 3, 1.95, 1.17),
    ],
    ids=["DeepSeek-V3", "Qwen3-235B-A22B", "Qwen3-30B-A3B"],
)
def test_routes_are_a_few_percent_of_bfloat16_kv(
    tmp_path: Path,
    config: dict[str, Any],
    kv: int,
    stored: int,
    applied: int,
    percent_stored: float,
    percent_applied: float,
) -> None:
    row = row_of(describe(preview(config_alone(tmp_path, config))), "bfloat16")
    assert (row["kv_bytes"], row["route_bytes"], row["applied_route_bytes"]) == (
        kv,
        stored,
        applied,
    )
    assert round(100 * row["route_to_kv_ratio"], 2) == percent_stored
    assert round(100 * row["applied_route_to_kv_ratio"], 2) == percent_applied
    assert row["score_to_kv_ratio"] == round(16 / kv, 6)


def test_kv_computed_in_float32_is_twice_as_large(tmp_path: Path) -> None:
    described = describe(preview(config_alone(tmp_path, QWEN3_235B)))
    rows = [row_of(described, dtype) for dtype in ("float32", "bfloat16")]
    assert rows[0]["kv_bytes"] == 2 * rows[1]["kv_bytes"]
    assert rows[0]["applied_route_bytes"] == rows[0]["route_bytes"]
    assert described["kv_bytes_per_token"] == rows[0]["kv_bytes"]


def test_a_config_alone_is_told_in_words_with_exit_code_0(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = config_alone(tmp_path, DEEPSEEK_V3)
    assert main(["check", str(model), "--ep-size", "32", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "config.json alone: tensors and tokenizer not checked" in out
    assert "2320 bytes = 3.30 % of KV" in out
    assert "does not fit: 32 ranks that take " in out


def test_a_tokenizer_beside_a_config_is_checked(tmp_path: Path) -> None:
    write_variant(tmp_path, SHAPE_VARIANTS["qwen3"], seed=1)
    (tmp_path / "model.safetensors").unlink()
    found = describe(preview(tmp_path))
    assert (found["tensors_checked"], found["tokenizer_checked"]) == (False, True)


def test_what_a_config_alone_tells_of_a_rank_is_what_its_weights_tell(tmp_path: Path) -> None:
    write_variant(tmp_path, SHAPE_VARIANTS["qwen3"], seed=1)
    whole = preview(tmp_path).plan
    (tmp_path / "model.safetensors").unlink()
    alone = preview(tmp_path).plan
    assert alone == whole


# --- whole models


def test_the_demo_model_loads_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert "loads: all 838 tensors are there, shapes and dtypes fit, 14468096 bytes" in out
    assert "80 bytes = 10.00 % of KV, weights float32 as stored" in out
    assert "does not fit" not in out


def test_check_tells_what_each_rank_would_hold(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    file.write_text("older")
    assert main(["check", "--ep-size", "8", "--kv-memory", "16MiB", "--json", str(file)]) == 0
    described = json.loads(file.read_text())
    assert described["experts"] == 64
    assert described["experts_per_rank"] == 8
    assert described["kv_bytes_per_rank"] <= 16 * 2**20
    tokens = described["kv_bytes_per_rank"] / described["kv_bytes_per_token"]
    assert tokens == described["kv_tokens_per_rank"] == 16 * described["kv_blocks_per_rank"]
    assert described["does_not_fit"] == []


def test_ranks_share_the_experts_and_each_hold_the_rest() -> None:
    plans = {n: preview(ep_size=n).plan for n in (1, 8)}
    replicated = plans[1].weight_bytes_per_rank - plans[1].expert_bytes_per_rank
    assert plans[1].weight_bytes_per_rank >= plans[1].checkpoint_bytes
    assert plans[8].expert_bytes_per_rank == plans[1].expert_bytes_per_rank // 8
    assert plans[8].weight_bytes_per_rank == replicated + plans[8].expert_bytes_per_rank


def test_a_cell_that_can_start_is_planned_as_it_is_previewed() -> None:
    assert plan_cell(load_config(None, {})) == preview().plan


def test_the_model_was_made_when_the_newest_file_of_its_checkpoint_was(tmp_path: Path) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    for number, file in enumerate(sorted(model.iterdir())):
        os.utime(file, (0, 1_600_000_000 + number))
    os.utime(model / "model.safetensors", (0, 1_700_000_000))
    os.utime(model / "tokenizer.json", (0, 1_800_000_000))
    assert preview(model).plan.created == 1_700_000_000


def test_check_tells_of_a_model_with_grouped_query_attention(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = write_variant(tmp_path, SHAPE_VARIANTS["qwen3_as_many_kv_heads"], seed=1)
    assert main(["check", str(model)]) == 0
    out = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM" in out
    assert "3, 2 of them with experts" in out
    assert f"{3 * 2 * 4 * 24 * 4} bytes" in out


# --- hosts


def needed_bytes(plan: CellPlan) -> int:
    """What `check` prints of each rank and of the engine, added up."""
    described = describe(CellPreview(plan, preview().model, ()))
    rank = ("weight_bytes_per_rank", "kv_bytes_per_rank", "plan_budget_bytes_per_rank")
    engine = ("route_budget_bytes", "score_budget_bytes")
    sizes: dict[str, int] = described
    return plan.ep_size * sum(sizes[name] for name in rank) + sum(sizes[name] for name in engine)


@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        ("num_kv_blocks", "--kv-memory or --num-kv-blocks"),
        ("plan_budget_bytes", "store.plan_memory"),
        ("route_budget_bytes", "--route-memory"),
        ("score_budget_bytes", "--score-memory"),
    ],
)
def test_every_budget_counts_and_the_largest_is_to_be_lowered(part: str, remedy: str) -> None:
    plan = dataclasses.replace(preview().plan, **{part: 2**30})
    needed = needed_bytes(plan)
    assert shortfalls(plan, Host(needed, 0, None)) == ()
    (line,) = shortfalls(plan, Host(needed - 1, 0, None))
    assert line.endswith(f"exceed this host's memory ({needed - 1} bytes): lower {remedy}")


def test_weights_that_alone_are_too_large_are_told_as_such() -> None:
    plan = preview().plan
    weights = 4 * plan.weight_bytes_per_rank
    (line,) = shortfalls(plan, Host(weights - 1, 0, None))
    assert line.endswith(f"the weights alone need {weights}; --dtype bfloat16 takes half")


def test_gpus_that_are_too_few_or_too_small_are_told_one_by_one() -> None:
    plan = dataclasses.replace(preview().plan, uses_gpus=True)
    assert shortfalls(plan, Host(2**40, 4, 2**40)) == ()
    few, small = shortfalls(plan, Host(2**40, 1, 2**20))
    assert "--ep-size 4 needs as many GPUs, this host has 1" in few
    assert "which exceeds a GPU's memory (1048576 bytes): the weights alone need" in small


def test_beside_gpus_the_host_holds_the_engine_alone() -> None:
    plan = dataclasses.replace(preview().plan, uses_gpus=True)
    engine = plan.route_budget_bytes + plan.score_budget_bytes
    assert shortfalls(plan, Host(engine, 4, 2**40)) == ()
    (line,) = shortfalls(plan, Host(engine - 1, 4, 2**40))
    assert line.startswith(f"an engine that takes {engine} bytes (routes ")
    assert line.endswith(f"exceeds this host's memory ({engine - 1} bytes): lower --route-memory")
