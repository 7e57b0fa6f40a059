"""From committed steps and arrived routes to blocks in the store. Owner of what is still on its way.

A block is offered to the store when its KV is committed and its routes have arrived, scores of its tokens once it is
there; a request that dies first leaves nothing.
"""

from collections import deque
from collections.abc import Sequence

from cluster.routes import ExpertRoutes
from cluster.scores import ScoreColumns
from cluster.types import Rank, StepId
from cluster.worker_messages import LateFrame, ScoreFrame
from router_service.clients import PrefixStore
from router_service.engine_limits import FIRST_STEP
from router_service.features import Features
from router_service.request import Request
from router_service.scheduler import ScheduledChunk
from router_service.step_observer import StepObserver

MAX_DISCARDED = 256
"""Steps: with each came a recovery, so what ranks sent of an earlier one came long ago, or does not come."""

Expected = dict[tuple[StepId, Rank], deque[ScheduledChunk]]
"""Chunks whose part of a frame is on its way, in the order in which it will come."""


class Publisher:
    """Told of every committed step by `expect`, of every arrived frame by `record`."""

    def __init__(
        self,
        store: PrefixStore,
        block_size: int,
        features: Features,
        observer: StepObserver,
        *,
        first_step: StepId = FIRST_STEP,
    ) -> None:
        """first_step: what comes for steps before it was asked by another engine"""
        self._store = store
        self._block_size = block_size
        self._first_step = first_step
        self._features = features
        self._observer = observer
        self._routes: Expected = {}
        self._scores: Expected = {}
        self._discarded: deque[StepId] = deque(maxlen=MAX_DISCARDED)
        self._lost_before: dict[Rank, StepId] = {}

    def expect(self, step_id: StepId, chunks: Sequence[ScheduledChunk]) -> None:
        """For these chunks the gate chose routes, or scores were asked; their frames follow, per rank in this order."""
        for chunk in chunks:
            if not chunk.replays:
                _expect(self._routes, step_id, chunk)
            if chunk.num_scored:
                _expect(self._scores, step_id, chunk)

    def expected_ranks(self) -> list[Rank]:
        """Ranks that still owe routes or scores of a committed step."""
        return sorted({rank for _, rank in (*self._routes, *self._scores)})

    def take(self, frame: LateFrame) -> None:
        """What one rank's chunks of one step waited for."""
        step_id, rank, start = StepId(frame.step_id), Rank(frame.rank), 0
        wanted_from = self._lost_before.get(rank, self._first_step)
        if step_id in self._discarded or step_id < wanted_from:
            return
        for num_tokens in frame.num_tokens.tolist():
            end = start + num_tokens
            if isinstance(frame, ScoreFrame):
                self.record_scores(step_id, rank, frame.scores.slice(start, end))
            else:
                # a copy: a view would keep the routes of everybody in this step as long as this request lives
                ids, weights = frame.topk_ids[start:end], frame.topk_weights[start:end]
                self.record_routes(step_id, rank, ExpertRoutes(ids.copy(), weights.copy()))
            start = end

    def record_routes(self, step_id: StepId, rank: Rank, routes: ExpertRoutes) -> None:
        """Routes of the next expected chunk of that step and rank. A pass over KV that was there already made none:
        the request's are those of that KV."""
        chunk = _arrived(self._routes, step_id, rank)
        if chunk.records:
            chunk.request.route_log.append(routes)
        self.publish(chunk.request)

    def record_scores(self, step_id: StepId, rank: Rank, scores: ScoreColumns) -> None:
        """Scores that the next expected chunk of that step and rank asked for."""
        chunk = _arrived(self._scores, step_id, rank)
        chunk.request.score_log.add_prompt(chunk.first_position + 1, scores)
        self._store_scores(chunk.request)

    def publish(self, request: Request) -> None:
        """Offers the full blocks that are complete now. What was refused for want of room in the route budget is
        offered again with the next block, not with every token."""
        first, end = request.num_published_blocks, request.num_publishable_blocks
        if not self._may_offer(request):
            return
        if end <= max(first, request.num_offered_blocks):
            return
        assert request.home_rank is not None
        assert request.lease is not None
        request.num_offered_blocks = end
        size = self._block_size
        block_ids = request.block_table[first:end].tolist()
        publication = self._store.publish(
            request.lease,
            request.home_rank,
            request.token_ids,
            first,
            block_ids,
            request.route_log.slice(first * size, end * size),
        )
        for block_id, outcome in zip(block_ids, publication.outcomes, strict=True):
            if outcome == "private":
                break
            request.num_published_blocks += 1
            if outcome == "added":
                request.private_blocks.discard(block_id)
        self._store_scores(request)
        if publication.conflict:
            request.publishing = False
            num_private = len(block_ids) - (request.num_published_blocks - first)
            self._observer.conflicted(request, num_private)

    def _may_offer(self, request: Request) -> bool:
        held = request.publishing and request.lease is not None
        return held and self._features.prefix_store

    def _store_scores(self, request: Request) -> None:
        """Of blocks that the store has. What came late of earlier tokens goes with what is new."""
        log, end = request.score_log, request.num_published_blocks * self._block_size
        if not log.is_complete:
            end = min(end, log.num_scored_prompt_tokens)
        start = log.num_stored
        if end <= start or not self._may_offer(request):
            return
        assert request.lease is not None
        self._store.record_scores(request.lease, start, log.slice(start, end))
        log.num_stored = end

    def discard(self, step_id: StepId) -> None:
        """A step that was not committed: what ranks that did their share send of it is not waited for."""
        self._discarded.append(step_id)

    def lose_rank(self, rank: Rank, before: StepId) -> None:
        """Of steps before this one nothing more is waited for from the rank, and nothing taken that still comes."""
        self._lost_before[rank] = before
        for expected in (self._routes, self._scores):
            for key in [key for key in expected if key[1] == rank]:
                for chunk in expected.pop(key):
                    chunk.request.num_pending_frames -= 1

    def forget(self, request: Request) -> None:
        """A dropped request: frames that still come for it are recorded nowhere."""
        request.publishing = False


def _expect(expected: Expected, step_id: StepId, chunk: ScheduledChunk) -> None:
    assert chunk.request.home_rank is not None
    expected.setdefault((step_id, chunk.request.home_rank), deque()).append(chunk)
    chunk.request.num_pending_frames += 1


def _arrived(expected: Expected, step_id: StepId, rank: Rank) -> ScheduledChunk:
    queue = expected[step_id, rank]
    chunk = queue.popleft()
    if not queue:
        del expected[step_id, rank]
    chunk.request.num_pending_frames -= 1
    return chunk
