"""A cell of two ranks gets other weights: it then says, byte for byte, what a cell started with these says."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch._C._distributed_c10d import Store

from cluster.errors import CellError, DeadlineError
from cluster.messages import UpdateWeights, WeightsRefused, WeightsServed, WeightsUpdated
from cluster.model_config.read import read_model_spec
from cluster.namespace import model_fingerprint, weight_version
from expert_workers.host_memory import host_memory
from expert_workers.weight_exchange import ShareRoom, WeightExchange
from expert_workers.worker import ExpertWorker
from expert_workers.worker_builder import WorkerOptions, build_expert_worker
from router_service.served_checkpoint import ServedCheckpoint
from router_service.weight_update import WeightUpdate
from tests.helpers.cells import CellOptions, RunningRanks, running_ranks
from tests.helpers.engines import EngineHarness, Generation
from tests.helpers.tiny_checkpoints import write_tiny_checkpoint

EP_SIZE, BLOCK_SIZE = 2, 16
FRAGMENT_TOKENS = 32
OPTIONS = {"budget": 48, "max_num_seqs": 4}
_DRAW = np.random.default_rng(5)
PREFIX = _DRAW.integers(16, 3000, 70).tolist()
PROMPTS = [[*PREFIX, 17], [*PREFIX[:40], 18, 19], PREFIX[::-1]]
NUM_TOKENS = 5


class Around:
    """There are no clients to serve."""

    def serve(self, timeout_seconds: float) -> None:
        time.sleep(timeout_seconds)

    def end_requests(self) -> None:
        return

    def note_weights(self, served: WeightsServed) -> None:
        self.served = served

    def recover(self, error: CellError) -> None:
        raise error


class Cell:
    """An engine over ranks that run, and what exchanges the weights of both."""

    def __init__(self, ranks: RunningRanks, model_dir: Path, *, timeout_seconds: float) -> None:
        self.harness: EngineHarness = ranks.engine(
            fragment_tokens=FRAGMENT_TOKENS,
            fingerprint=model_fingerprint(model_dir, "float32"),
            **OPTIONS,
        )
        checkpoint = ServedCheckpoint(model_dir, read_model_spec(model_dir), "float32")
        self._update = WeightUpdate(
            self.harness.engine,
            ranks.client,
            checkpoint,
            Around(),
            timeout_seconds=timeout_seconds,
        )
        self._num_requests = 0

    def update(self, model_dir: Path) -> WeightsUpdated | WeightsRefused:
        return self._update.run(UpdateWeights(1, str(model_dir), "restart"))

    def said(self) -> list[bytes]:
        """Tokens, scores and routes of all prompts: cold, found in the store, and replayed by plans."""
        cold = self._run()
        assert self._run() == cold
        self.harness.engine.evict("kv")
        assert self._run() == cold
        return cold

    def _run(self) -> list[bytes]:
        names = []
        for prompt in PROMPTS:
            names.append(f"r{self._num_requests}")
            self._num_requests += 1
            self.harness.submit(names[-1], prompt, NUM_TOKENS)
        self.harness.run()
        return [_content(self.harness.generations[name]) for name in names]


def _content(generation: Generation) -> bytes:
    completion = generation.completion
    assert completion is not None
    assert completion.finish_reason == "length"
    scores = b"".join(score.chosen_logprobs.tobytes() for score in generation.scores)
    routes = generation.routes.topk_ids.tobytes() + generation.routes.topk_weights.tobytes()
    return np.array(generation.token_ids, np.int32).tobytes() + scores + routes


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("first"), seed=1)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("second"), seed=2)


def serving(model_dir: Path, build: Callable[..., ExpertWorker] | None = None) -> CellOptions:
    return CellOptions(model_dir, EP_SIZE, num_kv_blocks=64, build_worker=build)


def test_after_an_update_and_after_the_way_back_answers_are_those_of_a_fresh_cell(
    first: Path, second: Path
) -> None:
    with running_ranks(serving(second)) as ranks:
        of_second = Cell(ranks, second, timeout_seconds=60.0).said()
    with running_ranks(serving(first)) as ranks:
        cell = Cell(ranks, first, timeout_seconds=60.0)
        of_first = cell.said()
        assert of_first != of_second
        for model_dir, expected in ((second, of_second), (first, of_first)):
            updated = cell.update(model_dir)
            assert isinstance(updated, WeightsUpdated)
            assert updated.weight_version == weight_version(model_fingerprint(model_dir, "float32"))
            assert cell.harness.store.stats().num_nodes == 0
            assert cell.said() == expected


class NoRoom(WeightExchange):
    """A rank without memory for a second share."""

    def __init__(self) -> None:
        self.fingerprint = None

    def measure(self, model_dir: Path) -> ShareRoom:
        return ShareRoom(2**62, host_memory())

    def discard(self) -> None:
        return


class Fails(NoRoom):
    def measure(self, model_dir: Path) -> ShareRoom:
        return ShareRoom(0, host_memory())

    def prepare(self, model_dir: Path) -> str:
        raise OSError("no such device")


class Dies(Fails):
    def prepare(self, model_dir: Path) -> str:
        os._exit(1)


def build_with_rank_1(weights: WeightExchange) -> Callable[[WorkerOptions, Store], ExpertWorker]:
    def build(options: WorkerOptions, store: Store) -> ExpertWorker:
        worker = build_expert_worker(options, store=store)
        if options.rank == 1:
            worker.weights = weights
        return worker

    return build


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (NoRoom(), "ranks 0, 1 of one host need [0-9]{19} bytes"),
        (Fails(), "rank 1: OSError: no such device"),
    ],
)
def test_when_one_rank_cannot_read_its_share_both_say_what_they_said(
    weights: WeightExchange, reason: str, first: Path, second: Path
) -> None:
    with running_ranks(serving(first, build_with_rank_1(weights))) as ranks:
        cell = Cell(ranks, first, timeout_seconds=60.0)
        before = cell.said()
        refused = cell.update(second)
        assert isinstance(refused, WeightsRefused)
        assert refused.kind == "unavailable"
        assert re.match(reason, refused.reason)
        assert cell.said() == before


def test_a_rank_that_dies_while_it_reads_is_named(first: Path, second: Path) -> None:
    with running_ranks(serving(first, build_with_rank_1(Dies()))) as ranks:
        cell = Cell(ranks, first, timeout_seconds=3.0)
        with pytest.raises(DeadlineError, match="rank 1 did not read its weights within 3 s"):
            cell.update(second)
