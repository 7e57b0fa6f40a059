"""Logits of every token that forked ranks compute, and a switch that ruins their gates: only tests have these.

An observed rank leaves what it computed in files of a directory that both sides know; it is written before the step's
answer, so that after a step the test can read it.

Letters: T tokens, V vocabulary.
"""

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch._C._distributed_c10d import Store

from cluster.model_config.read import read_model_spec
from cluster.worker_messages import StepDescriptor
from expert_workers.device import torch_dtype
from expert_workers.dispatch.base import Dispatcher
from expert_workers.dispatch.load import LoadCountingDispatcher
from expert_workers.dispatch.local import LocalDispatcher
from expert_workers.dispatch.negotiated import NegotiatedDispatcher
from expert_workers.ep_group import join_group
from expert_workers.inputs_from_step import chunks_of_rank
from expert_workers.known_sequences import KnownSequences
from expert_workers.kv_pool import KVPool
from expert_workers.model.numerics import DeterministicNumerics, FastNumerics
from expert_workers.model.transformer import Transformer
from expert_workers.model.weights import ModelWeights, MoeWeights, WeightTarget, load_weights
from expert_workers.plan_cache import PlanCache
from expert_workers.rank_model import RankModel
from expert_workers.weight_exchange import WeightExchange
from expert_workers.worker import ExpertWorker, StepOutcome
from expert_workers.worker_builder import (
    WorkerOptions,
    expert_placement,
    grammar_compiler,
    plan_shape,
    rank_identity,
)

CHUNK_RECORD = np.dtype([("seq_id", "<i8"), ("first_position", "<i8"), ("num_tokens", "<i8")])
POISON_FILE = "poison-gates"


@dataclass(frozen=True, eq=False)
class LogitRows:
    """logits: [T, V] float32 of the tokens from `first_position` on, as one chunk computed them."""

    first_position: int
    logits: npt.NDArray[np.float32]

    @property
    def end_position(self) -> int:
        return self.first_position + len(self.logits)


class Observations:
    """The test's side of the directory. Owner of what has not been taken yet."""

    def __init__(self, directory: Path, ep_size: int, vocab_size: int) -> None:
        self._directory = directory
        self._ep_size = ep_size
        self._vocab_size = vocab_size

    def take(self) -> dict[int, list[LogitRows]]:
        """Everything computed since the last call, by seq_id and in order of steps; only between steps."""
        rows: dict[int, list[LogitRows]] = defaultdict(list)
        for rank in range(self._ep_size):
            files = chunk_file(self._directory, rank), logit_file(self._directory, rank)
            if not files[0].exists():
                continue
            logits = np.fromfile(files[1], np.float32).reshape(-1, self._vocab_size)
            start = 0
            for seq_id, first_position, num_tokens in np.fromfile(files[0], CHUNK_RECORD).tolist():
                rows[seq_id].append(LogitRows(first_position, logits[start : start + num_tokens]))
                start += num_tokens
            for file in files:
                os.truncate(file, 0)
        return rows

    def poison_gates(self) -> None:
        """From the next step on every gate weight of every rank is NaN, for good."""
        (self._directory / POISON_FILE).touch()


def chunk_file(directory: Path, rank: int) -> Path:
    return directory / f"chunks-{rank}"


def logit_file(directory: Path, rank: int) -> Path:
    return directory / f"logits-{rank}"


class ObservedTransformer(Transformer):
    """Keeps the logits of all tokens of the last step."""

    every_logit: Tensor

    def hidden(self, *arguments: Any) -> Tensor:
        hidden = super().hidden(*arguments)
        self.every_logit = self.logits(hidden)
        return hidden


class ObservedWorker(ExpertWorker):
    """Leaves each step's logits in `directory` and looks there for the order to poison its gates."""

    def __init__(
        self,
        directory: Path,
        *,
        transformer: ObservedTransformer,
        observed_weights: ModelWeights,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._directory = directory
        self._observed = transformer
        self._observed_weights = observed_weights

    def execute(self, step: StepDescriptor) -> StepOutcome:
        if (self._directory / POISON_FILE).exists():
            self._poison_gates()
        outcome = super().execute(step)
        self._leave(step)
        return outcome

    def _leave(self, step: StepDescriptor) -> None:
        chunks = chunks_of_rank(step, self.rank)
        # as the worker computes them: gate, replayed, planned
        chunks.sort(key=lambda chunk: (len(chunk.fragment_ids) > 0, chunk.route_id is not None))
        records = [(c.seq_id, c.first_position, c.num_tokens) for c in chunks]
        with logit_file(self._directory, self.rank).open("ab") as file:
            file.write(self._observed.every_logit.numpy().tobytes())
        with chunk_file(self._directory, self.rank).open("ab") as file:
            file.write(np.array(records, CHUNK_RECORD).tobytes())

    def _poison_gates(self) -> None:
        for layer in self._observed_weights.layers:
            if isinstance(layer.feed_forward, MoeWeights):
                layer.feed_forward.gate.weight.fill_(float("nan"))


def build_observed_worker(directory: Path, options: WorkerOptions, store: Store) -> ObservedWorker:
    """As `build_expert_worker` composes a worker."""
    spec = read_model_spec(options.model_dir)
    placement = expert_placement(options, spec)
    dtype = torch_dtype(options.dtype)
    target = WeightTarget(placement, options.rank, dtype, options.device)
    weights = load_weights(options.model_dir, spec, target)
    numerics = DeterministicNumerics() if options.deterministic else FastNumerics()
    group = None if options.dispatch == "local" else join_group(options.group_options, store)
    exchange = None if group is None else group.exchange
    dispatcher: Dispatcher = (
        LocalDispatcher(placement, options.device)
        if exchange is None
        else NegotiatedDispatcher(placement, exchange, options.device)
    )
    transformer = ObservedTransformer(spec, weights, numerics)
    return ObservedWorker(
        directory,
        observed_weights=weights,
        transformer=transformer,
        rank=options.rank,
        model=RankModel(spec, transformer, WeightExchange(weights, spec, target, options.dtype)),
        identity=rank_identity(options, placement),
        kv_pool=KVPool(
            num_layers=spec.num_layers,
            num_blocks=options.num_kv_blocks,
            block_size=options.block_size,
            width=spec.attention.kv_width,
            dtype=dtype,
            device=options.device,
        ),
        dispatcher=LoadCountingDispatcher(dispatcher, placement.num_physical_per_rank),
        plans=PlanCache(
            plan_shape(options, spec=spec, placement=placement, numerics=numerics), exchange
        ),
        group=group,
        sequences=KnownSequences(grammar_compiler(options, spec)),
    )
