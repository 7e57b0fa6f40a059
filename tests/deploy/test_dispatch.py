"""`--dispatch`: how the rows of a cell travel, and whether its replays go by plans."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.channel import PullSocket, RouterSocket
from cluster.config import Config, load_config
from cluster.types import DispatchMode
from deploy.bench.local_cell import LocalCell, local_cell
from deploy.cell_plan import CellPlan
from deploy.cli import main
from deploy.engine_side import start_compiler
from deploy.planning import plan_cell
from router_service.step_clock import StepClock
from router_service.worker_client import WorkerClient
from tests.helpers.states import BLOCK_SIZE, random_prompt
from tests.helpers.tiny_checkpoints import write_tiny_checkpoint

TABLE: list[tuple[str, int, DispatchMode, bool]] = [
    ("auto", 1, "local", False),
    ("auto", 2, "negotiated", True),
    ("auto", 4, "negotiated", True),
    ("negotiated", 1, "negotiated", False),
    ("negotiated", 2, "negotiated", False),
    ("negotiated", 4, "negotiated", False),
    ("planned", 1, "local", True),
    ("planned", 2, "negotiated", True),
    ("planned", 4, "negotiated", True),
]
"""Setting, ranks; the way of tokens without a plan, and whether replayed tokens get one."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"), seed=1)


def make_config(model_dir: Path, dispatch: str, ep_size: int) -> Config:
    settings = {
        "model.dir": str(model_dir),
        "cell.dispatch": dispatch,
        "cell.ep_size": ep_size,
        "scheduler.plan_wait_seconds": 30.0,
    }
    return load_config(None, settings)


@contextmanager
def cell_without_ranks(config: Config, plan: CellPlan) -> Iterator[LocalCell]:
    """Composed as a served one; its sockets lead nowhere."""
    with RouterSocket() as clients, RouterSocket() as workers, PullSocket() as routes:
        client = WorkerClient(
            identity=plan.identity("weights"),
            workers=workers,
            routes=routes,
            clients=clients,
            on_client_message=lambda: None,
            clock=StepClock(factor=1.0, floor_seconds=1.0),
        )
        compiler = start_compiler(plan)
        try:
            yield LocalCell(config, plan, client, compiler, "weights")
        finally:
            compiler.close()


@pytest.mark.parametrize(("dispatch", "ep_size", "mode", "by_plans"), TABLE)
def test_the_setting_and_the_ranks_decide_how_tokens_travel(
    model_dir: Path, dispatch: str, ep_size: int, mode: DispatchMode, by_plans: bool
) -> None:
    config = make_config(model_dir, dispatch, ep_size)
    plan = plan_cell(config)
    with cell_without_ranks(config, plan) as cell:
        assert (plan.dispatch, cell.engine.features.planned_dispatch) == (mode, by_plans)


@pytest.mark.parametrize(("dispatch", "mode"), [("auto", "local"), ("negotiated", "negotiated")])
def test_the_flag_is_the_setting(
    model_dir: Path, tmp_path: Path, dispatch: str, mode: DispatchMode
) -> None:
    file = tmp_path / "check.json"
    flags = ["--ep-size", "1", "--dispatch", dispatch, "--json", str(file)]
    assert main(["check", str(model_dir), *flags]) == 0
    assert json.loads(file.read_text())["dispatch"] == mode


@pytest.mark.parametrize(
    ("dispatch", "planned_blocks"), [("negotiated", 0), ("auto", 12), ("planned", 12)]
)
def test_a_replay_goes_by_plans_unless_the_cell_is_negotiated(
    model_dir: Path, dispatch: str, planned_blocks: int
) -> None:
    config = make_config(model_dir, dispatch, ep_size=2)
    prompt = random_prompt(12 * BLOCK_SIZE, seed=70, vocab_size=256)
    with local_cell(config, plan_cell(config)) as cell:
        cold = cell.generate("cold", prompt, 3, "salt")
        cell.engine.evict("kv")
        replay = cell.generate("replay", prompt, 3, "salt")
    assert replay.token_ids == cold.token_ids
    assert replay.completion.replayed_tokens == len(prompt)
    steps = replay.prefill
    assert sum(step.num_replayed_tokens for step in steps) == len(prompt)
    assert sum(step.num_planned_tokens for step in steps) == planned_blocks * BLOCK_SIZE
