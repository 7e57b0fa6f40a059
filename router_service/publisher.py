"""From committed steps and arrived routes to blocks in the store. Owner of what is still on its way.

A block is offered to the store when its KV is committed and its routes have arrived; a request that dies first leaves
nothing.
"""

from collections import deque
from collections.abc import Sequence

from cluster.routes import ExpertRoutes
from cluster.types import Rank, StepId
from router_service.clients import PrefixStore
from router_service.features import Features
from router_service.request import Request
from router_service.scheduler import ScheduledChunk
from router_service.step_observer import StepObserver


class Publisher:
    """Told of every committed step by `expect`, of every arrived frame by `record`."""

    def __init__(
        self, store: PrefixStore, block_size: int, features: Features, observer: StepObserver
    ) -> None:
        self._store = store
        self._block_size = block_size
        self._features = features
        self._observer = observer
        self._expected: dict[tuple[StepId, Rank], deque[ScheduledChunk]] = {}

    def expect(self, step_id: StepId, chunks: Sequence[ScheduledChunk]) -> None:
        """The gate chose routes for these chunks; their frames follow, per rank in this order."""
        for chunk in chunks:
            if chunk.replays:
                continue
            assert chunk.request.home_rank is not None
            queue = self._expected.setdefault((step_id, chunk.request.home_rank), deque())
            queue.append(chunk)
            chunk.request.num_pending_frames += 1

    def expected_ranks(self) -> list[Rank]:
        """Ranks that still owe routes of a committed step."""
        return sorted({rank for _, rank in self._expected})

    def record(self, step_id: StepId, rank: Rank, routes: ExpertRoutes) -> None:
        """Routes of the next expected chunk of that step and rank. A pass over KV that was there already made none:
        the request's are those of that KV."""
        queue = self._expected[step_id, rank]
        chunk = queue.popleft()
        if not queue:
            del self._expected[step_id, rank]
        chunk.request.num_pending_frames -= 1
        if chunk.records:
            chunk.request.route_log.append(routes)
        self.publish(chunk.request)

    def publish(self, request: Request) -> None:
        """Offers the full blocks that are complete now. What was refused for want of room in the route budget is
        offered again with the next block, not with every token."""
        first, end = request.num_published_blocks, request.num_publishable_blocks
        if not request.publishing or request.lease is None or not self._features.prefix_store:
            return
        if end <= max(first, request.num_offered_blocks):
            return
        assert request.home_rank is not None
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
        if publication.conflict:
            request.publishing = False
            num_private = len(block_ids) - (request.num_published_blocks - first)
            self._observer.conflicted(request, num_private)

    def forget(self, request: Request) -> None:
        """A dropped request: frames that still come for it are recorded nowhere."""
        request.publishing = False
