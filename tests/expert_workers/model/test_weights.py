from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.errors import CheckpointError
from cluster.model_config.read import read_model_spec
from cluster.model_spec import ComputeDtype
from cluster.placement import ExpertPlacement
from expert_workers.model.checkpoint import SINGLE_FILE, check_checkpoint
from expert_workers.model.weights import (
    ModelWeights,
    MoeWeights,
    WeightTarget,
    load_weights,
    weight_share,
)
from tests.helpers.placements import redundant_placement
from tests.helpers.tiny_checkpoints import (
    SHAPE_VARIANTS,
    CheckpointForm,
    write_tiny_checkpoint,
    write_variant,
)

CPU = torch.device("cpu")


def load(
    model_dir: Path,
    *,
    rank: int = 0,
    ep_size: int = 1,
    dtype: torch.dtype = torch.float32,
    calls: list[tuple[int, int]] | None = None,
) -> ModelWeights:
    spec = read_model_spec(model_dir)
    placement = ExpertPlacement.contiguous(spec.gate.num_experts, ep_size)
    progress = None if calls is None else lambda done, total: calls.append((done, total))
    return load_weights(model_dir, spec, WeightTarget(placement, rank, dtype, CPU), progress)


def moe(weights: ModelWeights, layer: int = 1) -> MoeWeights:
    feed_forward = weights.layers[layer].feed_forward
    assert isinstance(feed_forward, MoeWeights)
    return feed_forward


def tensors(value: object) -> list[Tensor]:
    """All tensors of nested dataclasses and tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors(part)]
    if is_dataclass(value):
        return [t for field in fields(value) for t in tensors(getattr(value, field.name))]
    return []


def test_ranks_hold_their_slices_of_the_experts(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, seed=1)
    whole = moe(load(tmp_path)).experts
    ranks = [moe(load(tmp_path, rank=rank, ep_size=4)).experts for rank in range(4)]
    assert ranks[0].gate_up.shape == (4, 64, 64)
    assert torch.equal(torch.cat([rank.gate_up for rank in ranks]), whole.gate_up)
    assert torch.equal(torch.cat([rank.down for rank in ranks]), whole.down)


def test_a_rank_loads_every_copy_that_it_holds_in_the_placement_s_order(tmp_path: Path) -> None:
    whole = moe(load(write_tiny_checkpoint(tmp_path, seed=1))).experts
    placement = redundant_placement(16, 2, seed=4)
    spec = read_model_spec(tmp_path)
    for rank in range(2):
        target = WeightTarget(placement, rank, torch.float32, CPU)
        experts = moe(load_weights(tmp_path, spec, target)).experts
        held = torch.from_numpy(placement.local_experts(rank)).long()
        assert len(held) > 8
        assert torch.equal(experts.gate_up, whole.gate_up[held])
        assert torch.equal(experts.down, whole.down[held])


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")]
)
@pytest.mark.parametrize("variant", ["plain", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ep_size", [1, 4])
def test_the_share_told_from_headers_is_what_a_rank_holds(
    ep_size: int, tied: bool, variant: str, dtype: torch.dtype, name: ComputeDtype, tmp_path: Path
) -> None:
    config = SHAPE_VARIANTS[variant] | {"tie_word_embeddings": tied}
    write_variant(tmp_path, config, seed=1, form=CheckpointForm(stacked_experts=tied))
    spec = read_model_spec(tmp_path)
    weights = load(tmp_path, rank=ep_size - 1, ep_size=ep_size, dtype=dtype)
    experts = ExpertPlacement.contiguous(16, ep_size).local_experts(ep_size - 1)
    share = weight_share(check_checkpoint(tmp_path, spec), experts, name)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in tensors(weights)}
    in_experts = [t for layer in spec.moe_layers for t in tensors(moe(weights, layer).experts)]
    assert share.expert_bytes == sum(tensor.nbytes for tensor in in_experts)
    assert share.replicated_bytes + share.expert_bytes == sum(held.values())


def test_shards_load_the_same_weights_as_one_file(tmp_path: Path) -> None:
    whole = load(write_tiny_checkpoint(tmp_path / "a", seed=1))
    sharded = load(write_tiny_checkpoint(tmp_path / "b", seed=1, form=CheckpointForm(num_shards=4)))
    pairs = zip(tensors(whole), tensors(sharded), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", ["plain", "qwen3_as_many_kv_heads"])
@pytest.mark.parametrize("rank", [0, 3])
def test_stacked_experts_load_as_the_same_weights(tmp_path: Path, name: str, rank: int) -> None:
    whole, stacked = (
        load(
            write_variant(tmp_path / str(form), SHAPE_VARIANTS[name], seed=1, form=form),
            rank=rank,
            ep_size=4,
        )
        for form in (CheckpointForm(), CheckpointForm(stacked_experts=True))
    )
    pairs = zip(tensors(whole), tensors(stacked), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_progress_ends_at_the_rank_s_share(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, seed=1, form=CheckpointForm(dtype=torch.bfloat16))
    whole: list[tuple[int, int]] = []
    part: list[tuple[int, int]] = []
    load(tmp_path, calls=whole)
    load(tmp_path, rank=1, ep_size=4, calls=part)
    assert whole[-1][0] == whole[-1][1]
    assert part[-1][0] == part[-1][1] < whole[-1][1]
    assert part == sorted(part)


def test_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    weights = load(write_tiny_checkpoint(tmp_path, seed=1, tie_word_embeddings=True))
    assert weights.head is weights.embedding


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_and_the_gate_stays_float32(
    tmp_path: Path, stored: torch.dtype
) -> None:
    write_tiny_checkpoint(tmp_path, seed=1, form=CheckpointForm(dtype=stored))
    weights = load(tmp_path, dtype=torch.bfloat16)
    assert weights.layers[0].attention.output.dtype == torch.bfloat16
    assert moe(weights).experts.gate_up.dtype == torch.bfloat16
    assert moe(weights).gate.weight.dtype == torch.float32
    bias = moe(weights).gate.score_correction_bias
    assert bias is not None
    assert bias.dtype == torch.float32


def test_loaded_weights_do_not_change_with_the_file(tmp_path: Path) -> None:
    weights = load(write_tiny_checkpoint(tmp_path, seed=1))
    before = [tensor.clone() for tensor in tensors(weights)]
    file = tmp_path / SINGLE_FILE
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(bytes(file.stat().st_size // 2))
    pairs = zip(before, tensors(weights), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_file_that_vanishes_is_a_checkpoint_error(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, seed=1)
    spec = read_model_spec(tmp_path)
    (tmp_path / SINGLE_FILE).unlink()
    placement = ExpertPlacement.contiguous(16, 1)
    with pytest.raises(CheckpointError):
        load_weights(tmp_path, spec, WeightTarget(placement, 0, torch.float32, CPU))
