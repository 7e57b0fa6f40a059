"""Ranks that do not hold the same model never take a step together."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import Store

from cluster.errors import CellError
from expert_workers.worker import ExpertWorker
from expert_workers.worker_builder import WorkerOptions, build_expert_worker
from tests.helpers.cells import CellOptions, running_ranks
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR


def change_one_weight(model_dir: Path) -> None:
    with (model_dir / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        last = file.read(4)
        file.seek(-4, 2)
        file.write(bytes([last[0] ^ 1, *last[1:]]))


def test_a_rank_with_one_other_weight_is_refused_before_the_first_step(tmp_path: Path) -> None:
    other_dir = shutil.copytree(DEMO_MODEL_DIR, tmp_path / "other")
    change_one_weight(other_dir)

    def build_worker(options: WorkerOptions, store: Store) -> ExpertWorker:
        model_dir = other_dir if options.rank == 1 else options.model_dir
        return build_expert_worker(replace(options, model_dir=model_dir), store=store)

    options = CellOptions(DEMO_MODEL_DIR, ep_size=2, build_worker=build_worker)
    with (
        pytest.raises(CellError, match=r"^rank 1 has model_fingerprint '\w{64}', .* '\w{64}'$"),
        running_ranks(options),
    ):
        pass
