"""One rank gets other weights while it lives: it then says what a rank that was started with them says."""

import json
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.errors import CheckpointError
from cluster.model_config.read import read_model_spec
from cluster.namespace import model_fingerprint
from cluster.placement import ExpertPlacement
from expert_workers.host_memory import HostMemory
from expert_workers.model.weights import WeightTarget, load_weights
from expert_workers.weight_exchange import ShareRoom, WeightExchange
from expert_workers.worker import ExpertWorker
from expert_workers.worker_builder import build_expert_worker
from tests.expert_workers.driving import (
    DrivenSequence,
    Driver,
    OneWorkerCell,
    make_options,
    make_prompt,
)
from tests.helpers.tiny_checkpoints import (
    QWEN3_CONFIG,
    TINY_CONFIG,
    CheckpointForm,
    write_json,
    write_tiny_checkpoint,
    write_variant,
)

NUM_TOKENS = 4


def worker_of(model_dir: Path) -> ExpertWorker:
    return build_expert_worker(replace(make_options(), model_dir=model_dir))


def said_by(worker: ExpertWorker) -> tuple[list[int], list[bytes]]:
    """Tokens, and the routes of every chunk with their weights."""
    sequence = DrivenSequence(0, make_prompt(20, seed=3))
    Driver(OneWorkerCell(worker)).run([sequence], NUM_TOKENS)
    routes = [r.topk_ids.tobytes() + r.topk_weights.tobytes() for r in sequence.routes]
    return sequence.output, routes


@pytest.mark.parametrize("config", [TINY_CONFIG, QWEN3_CONFIG], ids=["deepseek", "qwen3"])
def test_after_an_exchange_a_rank_says_what_one_started_with_these_weights_does(
    config: dict[str, Any], tmp_path: Path
) -> None:
    first, second = (write_variant(tmp_path / f"{s}", config, seed=s) for s in (1, 2))
    worker, other = worker_of(first), said_by(worker_of(second))
    before = said_by(worker)
    assert before != other
    assert worker.weights.prepare(second) == model_fingerprint(second, "float32")
    assert said_by(worker) == before
    worker.weights.commit()
    assert said_by(worker) == other
    worker.weights.prepare(first)
    worker.weights.commit()
    assert said_by(worker) == before


def test_the_way_in_which_a_checkpoint_lies_on_disk_may_be_another(tmp_path: Path) -> None:
    form = CheckpointForm(stacked_experts=True, num_shards=3, hub_spelling=True)
    first = write_tiny_checkpoint(tmp_path / "first", seed=1)
    second = write_tiny_checkpoint(tmp_path / "second", seed=2, form=form)
    worker = worker_of(first)
    worker.weights.prepare(second)
    worker.weights.commit()
    assert said_by(worker) == said_by(worker_of(second))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("first"), seed=1)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            TINY_CONFIG | {"hidden_size": 32},
            r"config.json: hidden_size is 32, that of the served model is 64",
        ),
        (
            TINY_CONFIG | {"kv_lora_rank": 16},
            r"attention.kv_lora_rank is 16, that of the served model is 32",
        ),
        (
            TINY_CONFIG | {"routed_scaling_factor": 1.0},
            r"gate.routed_scaling_factor is 1.0, .* is 2.5",
        ),
        (QWEN3_CONFIG, r"architecture is 'Qwen3MoeForCausalLM'"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_the_first_difference(
    config: dict[str, Any], named: str, first: Path, tmp_path: Path
) -> None:
    other = write_variant(tmp_path / "other", config, seed=2)
    worker = worker_of(first)
    before = said_by(worker)
    with pytest.raises(CheckpointError, match=named):
        worker.weights.prepare(other)
    assert said_by(worker) == before


def test_weights_of_another_dtype_are_refused(first: Path, tmp_path: Path) -> None:
    form = CheckpointForm(dtype=torch.bfloat16)
    other = write_tiny_checkpoint(tmp_path / "other", seed=2, form=form)
    with pytest.raises(CheckpointError, match="checkpoint_dtype is 'bfloat16'"):
        worker_of(first).weights.prepare(other)


def test_a_missing_shard_a_cut_file_and_a_missing_directory_are_named(
    first: Path, tmp_path: Path
) -> None:
    weights = worker_of(first).weights
    form = CheckpointForm(num_shards=2)
    no_shard = write_tiny_checkpoint(tmp_path / "no_shard", seed=2, form=form)
    shard = sorted(no_shard.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"shard {shard.name} is missing"):
        weights.prepare(no_shard)
    cut = write_tiny_checkpoint(tmp_path / "cut", seed=2) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        weights.prepare(cut.parent)
    with pytest.raises(CheckpointError, match="nowhere"):
        weights.prepare(tmp_path / "nowhere")


def test_a_tensor_of_another_shape_than_the_config_says_is_named(
    first: Path, tmp_path: Path
) -> None:
    other = write_tiny_checkpoint(tmp_path / "other", seed=2, moe_intermediate_size=16)
    config = json.loads((other / "config.json").read_text())
    write_json(other / "config.json", config | {"moe_intermediate_size": 32})
    with pytest.raises(CheckpointError, match=r"tensor model.layers.1.mlp.* has shape"):
        worker_of(first).weights.prepare(other)


def test_a_second_share_is_measured_as_large_as_the_one_that_serves(first: Path) -> None:
    spec = read_model_spec(first)
    placement = ExpertPlacement.contiguous(spec.gate.num_experts, 2)
    target = WeightTarget(placement, 1, torch.float32, torch.device("cpu"))
    served, memory = load_weights(first, spec, target), HostMemory("host", 1000)
    exchange = WeightExchange(served, spec, target, "float32", memory=lambda: memory)
    assert exchange.measure(first) == ShareRoom(num_bytes(served), memory)


def num_bytes(weights: Any) -> int:
    """Of all tensors; this checkpoint ties none."""
    if isinstance(weights, torch.Tensor):
        return weights.nbytes
    if isinstance(weights, tuple):
        return sum(map(num_bytes, weights))
    return sum(map(num_bytes, vars(weights).values())) if is_dataclass(weights) else 0


def test_another_model_is_refused_when_it_is_measured(first: Path, tmp_path: Path) -> None:
    other = write_variant(tmp_path / "other", TINY_CONFIG | {"hidden_size": 32}, seed=2)
    with pytest.raises(CheckpointError, match="hidden_size is 32"):
        worker_of(first).weights.measure(other)
