"""Drives workers through steps as an engine would: descriptors from chunks, prompts in pieces, decode, replay."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from cluster.model_config.read import read_model_spec
from cluster.routes import ExpertRoutes
from cluster.types import DispatchMode
from cluster.worker_messages import (
    RouteChunk,
    RouteFrame,
    SequenceStart,
    StepDescriptor,
    StepResult,
)
from expert_workers.worker import ExpertWorker
from expert_workers.worker_builder import WorkerOptions
from tests.helpers.ranks import LOOPBACK

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
SPEC = read_model_spec(DEMO_MODEL)
BLOCK_SIZE = 16
NUM_KV_BLOCKS = 64
BLOCKS_PER_SEQUENCE = 8


def make_options(
    rank: int = 0, ep_size: int = 1, *, deterministic: bool = True, exchange_timeout: float = 20.0
) -> WorkerOptions:
    return WorkerOptions(
        model_dir=DEMO_MODEL,
        rank=rank,
        ep_size=ep_size,
        dtype="float32",
        device=torch.device("cpu"),
        num_kv_blocks=NUM_KV_BLOCKS,
        block_size=BLOCK_SIZE,
        deterministic=deterministic,
        dispatch="local" if ep_size == 1 else "negotiated",
        exchange="gloo",
        host_address=LOOPBACK,
        store_address=LOOPBACK,
        store_port=0,
        join_timeout_seconds=30.0,
        exchange_timeout_seconds=exchange_timeout,
    )


@dataclass(frozen=True)
class ChunkSpec:
    """One chunk of a descriptor. `blocks`: the sequence's block table."""

    seq_id: int
    token_ids: Sequence[int]
    blocks: Sequence[int]
    first_position: int = 0
    rank: int = 0
    route_id: int = -1
    samples: bool = True
    num_suppressed: int = 0
    score_target_ids: Sequence[int] = ()
    fragment_ids: Sequence[int] = ()


def make_step(
    step_id: int,
    chunks: Sequence[ChunkSpec],
    *,
    dispatch: DispatchMode = "local",
    placement_epoch: int = 0,
    evicted_fragment_ids: Sequence[int] = (),
) -> StepDescriptor:
    def column(values: Sequence[int]) -> np.ndarray:
        return np.array(values, np.int32)

    return StepDescriptor(
        step_id=step_id,
        placement_epoch=placement_epoch,
        dispatch=dispatch,
        seq_ids=column([c.seq_id for c in chunks]),
        ranks=column([c.rank for c in chunks]),
        first_positions=column([c.first_position for c in chunks]),
        num_tokens=column([len(c.token_ids) for c in chunks]),
        route_ids=column([c.route_id for c in chunks]),
        samples=column([c.samples for c in chunks]),
        num_suppressed=column([c.num_suppressed for c in chunks]),
        input_ids=column([t for c in chunks for t in c.token_ids]),
        block_table_lens=column([len(c.blocks) for c in chunks]),
        block_tables=column([b for c in chunks for b in c.blocks]),
        fragment_lens=column([len(c.fragment_ids) for c in chunks]),
        fragment_ids=column([f for c in chunks for f in c.fragment_ids]),
        evicted_fragment_ids=column(evicted_fragment_ids),
        score_lens=column([len(c.score_target_ids) for c in chunks]),
        score_target_ids=column([t for c in chunks for t in c.score_target_ids]),
    )


def make_prompt(num_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, SPEC.vocab_size, num_tokens).tolist()


class Cell(Protocol):
    """Workers that can be driven, in this process or behind sockets."""

    dispatch: DispatchMode

    def tell(self, rank: int, message: SequenceStart | RouteChunk) -> None: ...

    def execute(self, step: StepDescriptor) -> tuple[list[StepResult], list[RouteFrame]]: ...


class OneWorkerCell:
    """The worker called directly."""

    dispatch: DispatchMode = "local"

    def __init__(self, worker: ExpertWorker) -> None:
        self._worker = worker

    def tell(self, rank: int, message: SequenceStart | RouteChunk) -> None:
        if isinstance(message, SequenceStart):
            self._worker.start_sequence(message)
        else:
            self._worker.add_route_chunk(message)

    def execute(self, step: StepDescriptor) -> tuple[list[StepResult], list[RouteFrame]]:
        outcome = self._worker.execute(step)
        return [outcome.result], [outcome.routes] if outcome.routes is not None else []


@dataclass
class DrivenSequence:
    """A request under way. `routes`: what its gate chose or what it replays, one entry per chunk."""

    seq_id: int
    prompt: list[int]
    rank: int = 0
    temperature: float = 0.0
    replay: ExpertRoutes | None = None
    output: list[int] = field(default_factory=list)
    routes: list[ExpertRoutes] = field(default_factory=list)
    num_computed_tokens: int = 0

    @property
    def blocks(self) -> range:
        first = self.seq_id * BLOCKS_PER_SEQUENCE
        return range(first, first + BLOCKS_PER_SEQUENCE)

    @property
    def all_routes(self) -> ExpertRoutes:
        return ExpertRoutes.concatenate(self.routes, SPEC.route_shape)


class Driver:
    """Runs sequences until each has its tokens. Owner of step ids and route ids."""

    def __init__(self, cell: Cell, *, chunk_tokens: int = 64) -> None:
        self._cell = cell
        self._chunk_tokens = chunk_tokens
        self._next_step = 0

    def run(self, sequences: Sequence[DrivenSequence], num_output_tokens: int) -> list[StepResult]:
        """All results, step after step. Outputs and routes land in the sequences."""
        for s in sequences:
            self._cell.tell(s.rank, SequenceStart(s.seq_id, s.temperature, 0.9, seed=s.seq_id))
        results = []
        while any(len(s.output) < num_output_tokens for s in sequences):
            results += self.step([s for s in sequences if len(s.output) < num_output_tokens])
        return results

    def step(self, sequences: list[DrivenSequence]) -> list[StepResult]:
        """One chunk of each."""
        by_id = {s.seq_id: s for s in sequences}
        chunks = sorted((self._chunk(s) for s in sequences), key=lambda chunk: chunk.rank)
        step = make_step(self._next_step, chunks, dispatch=self._cell.dispatch)
        results, frames = self._cell.execute(step)
        self._next_step += 1
        for chunk in chunks:
            by_id[chunk.seq_id].num_computed_tokens += len(chunk.token_ids)
        for result in results:
            for seq_id, token_id in zip(result.seq_ids, result.token_ids, strict=True):
                by_id[seq_id].output.append(token_id)
        for frame in frames:
            for seq_id, routes in routes_by_chunk(frame):
                by_id[seq_id].routes.append(routes)
        return results

    def _chunk(self, s: DrivenSequence) -> ChunkSpec:
        known = s.prompt + s.output
        start = s.num_computed_tokens
        end = min(len(known), start + self._chunk_tokens)
        route_id = -1
        if s.replay is not None and start < s.replay.num_tokens:
            end = min(end, s.replay.num_tokens)
            route_id = 1000 * self._next_step + s.seq_id
            routes = s.replay.slice(start, end)
            self._cell.tell(
                s.rank,
                RouteChunk(route_id, self._next_step, routes.topk_ids, routes.topk_weights),
            )
            s.routes.append(routes)
        return ChunkSpec(
            seq_id=s.seq_id,
            token_ids=known[start:end],
            blocks=s.blocks,
            first_position=start,
            rank=s.rank,
            route_id=route_id,
            samples=end == len(known),
        )


def routes_by_chunk(frame: RouteFrame) -> Iterator[tuple[int, ExpertRoutes]]:
    ends = np.cumsum(frame.num_tokens).tolist()
    routes = ExpertRoutes(frame.topk_ids, frame.topk_weights)
    starts = [0, *ends[:-1]]
    for seq_id, start, end in zip(frame.seq_ids.tolist(), starts, ends, strict=True):
        yield seq_id, routes.slice(start, end)
