"""One rank of a cell: executes steps. Knows what it was told of sequences and received routes; no sockets here."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import Tensor

from cluster.routes import ExpertRoutes
from cluster.scores import ScoreColumns
from cluster.worker_messages import (
    CellIdentity,
    PlanPart,
    RouteChunk,
    RouteFrame,
    ScoreFrame,
    SentTraffic,
    SequenceStart,
    StepDescriptor,
    StepResult,
    StepTimings,
)
from expert_workers.dispatch.load import LoadCountingDispatcher
from expert_workers.dispatch.planned import PlannedStep
from expert_workers.ep_group import EpGroup
from expert_workers.inputs_from_step import (
    Chunk,
    InputsBuilder,
    StepLimits,
    StepRefusedError,
    check_step,
    chunks_of_rank,
    has_dynamic_chunks,
    planned_chunks_of_step,
)
from expert_workers.known_sequences import KnownSequences
from expert_workers.kv_pool import KVPool
from expert_workers.plan_cache import PlanCache
from expert_workers.rank_model import RankModel
from expert_workers.route_recorder import StepRoutes
from expert_workers.sampler import DrawnTokens, RowSampling, sample
from expert_workers.scoring import score
from expert_workers.stopwatch import Stopwatch

SCORED_ROWS = 256
"""Rows of logits that exist together when a prompt is scored: with 150,000 tokens in the vocabulary, 150 MB."""


@dataclass(frozen=True)
class StepOutcome:
    """`routes` is None when no token of this rank went through a gate, `scores` when no chunk asked for some."""

    result: StepResult
    routes: RouteFrame | None
    scores: ScoreFrame | None


@dataclass(frozen=True)
class _StepWork:
    """This rank's checked share of a step. `sampled`: chunks whose next token is drawn, in the order of the logits."""

    gate_chunks: list[Chunk]
    replay_chunks: list[Chunk]
    planned_chunks: list[Chunk]
    replayed: ExpertRoutes
    planned: PlannedStep | None
    sampled: list[Chunk]
    rows: list[RowSampling]

    @property
    def chunks(self) -> list[Chunk]:
        """In the order of the step's tokens on this rank."""
        return [*self.gate_chunks, *self.replay_chunks, *self.planned_chunks]


class ExpertWorker:
    """Owner of one rank's KV memory, known sequences and received routes. One thread."""

    def __init__(
        self,
        *,
        rank: int,
        identity: CellIdentity,
        model: RankModel,
        kv_pool: KVPool,
        dispatcher: LoadCountingDispatcher,
        plans: PlanCache,
        group: EpGroup | None,
        sequences: KnownSequences,
    ) -> None:
        """sequences: none known yet."""
        self.rank = rank
        self._identity = identity
        self.weights = model.weights
        self.kv_pool = kv_pool
        self._spec = spec = model.spec
        self._transformer = model.transformer
        self._dispatcher = dispatcher
        self._plans = plans
        self._group = group
        self._stopwatch = Stopwatch()
        self._inputs = InputsBuilder(kv_pool.block_size, spec.route_shape, kv_pool.rows.device)
        self._sequences = sequences
        self._route_chunks: dict[int, RouteChunk] = {}
        self._limits = StepLimits(
            ep_size=identity.ep_size,
            placement_epoch=identity.placement_epoch,
            dispatch=identity.dispatch,
            vocab_size=spec.vocab_size,
            max_position_embeddings=spec.max_position_embeddings,
            num_kv_blocks=kv_pool.num_blocks,
            block_size=kv_pool.block_size,
        )

    @property
    def identity(self) -> CellIdentity:
        """With the weights that it serves by now."""
        fingerprint = self.weights.fingerprint
        if fingerprint is None:
            return self._identity
        return replace(self._identity, model_fingerprint=fingerprint)

    def start_sequence(self, start: SequenceStart) -> None:
        self._sequences.start(start)

    def end_sequences(self, seq_ids: Sequence[int]) -> None:
        """Forgets them; unknown ones are none of this rank's."""
        self._sequences.end(seq_ids)

    def add_route_chunk(self, chunk: RouteChunk) -> None:
        """Kept until a later step than its own is executed."""
        self._route_chunks[chunk.route_id] = chunk

    def add_plan_part(self, part: PlanPart) -> None:
        """Kept until a step evicts it. Raises StepRefusedError for one that does not fit this rank."""
        self._plans.add(part)

    @torch.inference_mode()
    def execute(self, step: StepDescriptor) -> StepOutcome:
        """Runs this rank's share; with no chunks it only serves its experts.

        Raises StepRefusedError before the first exchange, ExchangeError when one breaks.
        """
        started = time.perf_counter()
        self._stopwatch.reset()
        work = self._prepare(step)
        inputs = self._inputs.build(
            work.gate_chunks, work.replay_chunks, work.replayed, work.planned_chunks
        )
        step_routes = StepRoutes(inputs, self._spec.route_shape, self._stopwatch)
        hidden = self._transformer.hidden(
            inputs, self.kv_pool, step_routes, self._dispatcher, self._stopwatch, work.planned
        )
        logits = self._transformer.logits(hidden.index_select(0, inputs.last_token_indices))
        drawn = sample(logits, work.rows)
        scores = self._prompt_scores(work, hidden)
        forward_seconds = time.perf_counter() - started
        poisoned = _poisoned_seq_ids(work, step_routes.poisoned_tokens().numpy(), drawn, scores)
        return StepOutcome(
            result=self._result(step, work, logits, drawn, poisoned, forward_seconds),
            routes=self._route_frame(step, work, step_routes),
            scores=self._score_frame(step, scores),
        )

    def leave_group(self) -> None:
        """After a broken exchange. KV, weights, sequences and plans stay; no step runs until `rejoin`. Idempotent."""
        if self._group is not None:
            self._group.leave()

    def rejoin(self, store_address: str, store_port: int, timeout_seconds: float) -> None:
        """Joins the group that meets at this store. What a step left that did not end counts for nothing. Raises
        CellError, and is in no group then."""
        self._dispatcher.take_load()
        if self._group is not None:
            self._group.rejoin_at(store_address, store_port, timeout_seconds)

    def forget_engine(self) -> None:
        """Another one is in its place, which knows of none of its sequences, routes, plans and prepared weights."""
        self._sequences.end_all()
        self._route_chunks.clear()
        self._plans.clear()
        self.weights.discard()

    def close(self) -> None:
        self._sequences.close()
        self.leave_group()

    def _prepare(self, step: StepDescriptor) -> _StepWork:
        check_step(step, self._limits)
        self._route_chunks = {
            route_id: chunk
            for route_id, chunk in self._route_chunks.items()
            if chunk.step_id >= step.step_id
        }
        chunks = chunks_of_rank(step, self.rank)
        planned_chunks = [c for c in chunks if c.fragment_ids]
        replay_chunks = [c for c in chunks if not c.fragment_ids and c.route_id is not None]
        gate_chunks = [c for c in chunks if not c.fragment_ids and c.route_id is None]
        self._require_known(step, [c for c in chunks if c.samples or len(c.score_target_ids)])
        for chunk in chunks:
            self._sequences.note(chunk)
        sampled = [c for c in (*gate_chunks, *replay_chunks, *planned_chunks) if c.samples]
        self._plans.evict(step.evicted_fragment_ids.tolist())
        return _StepWork(
            gate_chunks=gate_chunks,
            replay_chunks=replay_chunks,
            planned_chunks=planned_chunks,
            planned=self._plans.plan_step(
                step.step_id,
                planned_chunks_of_step(step),
                has_dynamic=has_dynamic_chunks(step),
            ),
            replayed=ExpertRoutes.concatenate(
                [self._routes_of(step, chunk) for chunk in replay_chunks], self._spec.route_shape
            ),
            sampled=sampled,
            rows=[self._sequences.row_sampling(chunk) for chunk in sampled],
        )

    def _routes_of(self, step: StepDescriptor, chunk: Chunk) -> ExpertRoutes:
        """The received routes that a chunk names, checked against the model and the chunk."""
        received = None if chunk.route_id is None else self._route_chunks.get(chunk.route_id)
        where = f"step {step.step_id}: seq {chunk.seq_id} replays route {chunk.route_id}"
        if received is None or received.step_id != step.step_id:
            raise StepRefusedError(
                f"{where}, which rank {self.rank} has not received for this step"
            )
        shape = self._spec.route_shape
        expected = (chunk.num_tokens, shape.num_moe_layers, shape.num_experts_per_tok)
        ids, weights = received.topk_ids, received.topk_weights
        if ids.shape != expected or weights.shape != expected:
            raise StepRefusedError(
                f"{where} of shape {ids.shape} and {weights.shape}, expected {expected}"
            )
        if ids.dtype != shape.id_dtype or weights.dtype != shape.weight_dtype:
            raise StepRefusedError(
                f"{where} of {ids.dtype} and {weights.dtype}, "
                f"expected {shape.id_dtype} and {shape.weight_dtype}"
            )
        if int(ids.max()) >= shape.num_experts:
            raise StepRefusedError(
                f"{where} with expert {int(ids.max())}, the model has {shape.num_experts}"
            )
        return ExpertRoutes(ids, weights)

    def _require_known(self, step: StepDescriptor, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.seq_id not in self._sequences:
                raise StepRefusedError(
                    f"step {step.step_id} samples or scores seq {chunk.seq_id}, "
                    f"which rank {self.rank} was never told of"
                )

    def _result(
        self,
        step: StepDescriptor,
        work: _StepWork,
        logits: Tensor,
        drawn: DrawnTokens,
        poisoned: list[int],
        forward_seconds: float,
    ) -> StepResult:
        """Poisoned sequences and those that failed have no token: none would mean anything."""
        sound = [chunk.seq_id for chunk in work.sampled if chunk.seq_id not in poisoned]
        failures = self._sequences.failures(sound)
        dropped = {*poisoned, *(failure.seq_id for failure in failures)}
        rows = [r for r, chunk in enumerate(work.sampled) if chunk.seq_id not in dropped]
        rows.sort(key=lambda row: work.sampled[row].index)
        seq_ids = [work.sampled[row].seq_id for row in rows]
        token_ids = [drawn.token_ids[row] for row in rows]
        return StepResult(
            rank=self.rank,
            step_id=step.step_id,
            seq_ids=seq_ids,
            token_ids=token_ids,
            poisoned_seq_ids=poisoned,
            gate_tokens=sum(c.num_tokens for c in work.gate_chunks),
            expert_load=self._expert_load(work.planned),
            sent=SentTraffic(0, 0) if self._group is None else self._group.exchange.take(),
            scores=score(
                logits[rows], token_ids, list(map(self._sequences.num_top_logprobs, seq_ids))
            ),
            timings=StepTimings(
                forward=forward_seconds,
                attention=self._stopwatch.seconds("attention"),
                gate=self._stopwatch.seconds("gate"),
                dispatch=self._stopwatch.seconds("dispatch"),
                experts=self._stopwatch.seconds("experts"),
                combine=self._stopwatch.seconds("combine"),
            ),
            failures=failures,
            compiling_seq_ids=self._sequences.compiling(),
        )

    def _prompt_scores(self, work: _StepWork, hidden: Tensor) -> list[tuple[Chunk, ScoreColumns]]:
        """hidden: [T, H], chunks as `_StepWork` has them. Of those that ask, in the descriptor's order."""
        found, start = [], 0
        for chunk in work.chunks:
            if len(chunk.score_target_ids):
                found.append((chunk, self._scores(chunk, hidden[start:])))
            start += chunk.num_tokens
        found.sort(key=lambda pair: pair[0].index)
        return found

    def _score_frame(
        self, step: StepDescriptor, scores: list[tuple[Chunk, ScoreColumns]]
    ) -> ScoreFrame | None:
        if not scores:
            return None
        return ScoreFrame(
            rank=self.rank,
            step_id=step.step_id,
            seq_ids=np.array([chunk.seq_id for chunk, _ in scores], np.int32),
            num_tokens=np.array([columns.num_tokens for _, columns in scores], np.int32),
            scores=ScoreColumns.joined([columns for _, columns in scores]),
        )

    def _scores(self, chunk: Chunk, hidden: Tensor) -> ScoreColumns:
        """hidden: rows of the chunk's tokens first."""
        targets = chunk.score_target_ids.tolist()
        num_top = self._sequences.num_top_logprobs(chunk.seq_id)
        parts = []
        for start in range(0, len(targets), SCORED_ROWS):
            asked = targets[start : start + SCORED_ROWS]
            logits = self._transformer.logits(hidden[start : start + len(asked)])
            parts.append(score(logits, asked, [num_top] * len(asked)))
        return ScoreColumns.joined(parts)

    def _expert_load(self, planned: PlannedStep | None) -> npt.NDArray[np.int32]:
        """[MoE layers, local experts] rows that went through them, planned or not."""
        dynamic = self._dispatcher.take_load()
        if planned is None:
            return dynamic
        return planned.expert_load + dynamic if len(dynamic) else planned.expert_load

    def _route_frame(
        self, step: StepDescriptor, work: _StepWork, step_routes: StepRoutes
    ) -> RouteFrame | None:
        if not work.gate_chunks:
            return None
        recorded = step_routes.recorded()
        return RouteFrame(
            rank=self.rank,
            step_id=step.step_id,
            seq_ids=np.array([c.seq_id for c in work.gate_chunks], np.int32),
            num_tokens=np.array([c.num_tokens for c in work.gate_chunks], np.int32),
            topk_ids=recorded.topk_ids,
            topk_weights=recorded.topk_weights,
        )


def _poisoned_seq_ids(
    work: _StepWork,
    poisoned_tokens: npt.NDArray[np.bool_],
    drawn: DrawnTokens,
    scores: list[tuple[Chunk, ScoreColumns]],
) -> list[int]:
    """poisoned_tokens: [T]. Sequences with a non-finite router logit or logit, in ascending order."""
    poisoned = {
        chunk.seq_id for chunk, bad in zip(work.sampled, drawn.poisoned, strict=True) if bad
    }
    poisoned |= {
        chunk.seq_id for chunk, columns in scores if not np.isfinite(columns.chosen_logprobs).all()
    }
    start = 0
    for chunk in work.gate_chunks:
        if poisoned_tokens[start : start + chunk.num_tokens].any():
            poisoned.add(chunk.seq_id)
        start += chunk.num_tokens
    return sorted(poisoned)
