"""What the engine needs from others, as Protocols: the prefix store and the expert workers."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.prefix_match import Eviction, Lease, PrefixMatch, Publication, StoreStats
from cluster.routes import ExpertRoutes
from cluster.scores import TokenScores
from cluster.types import BlockId, EvictTarget, Namespace, Rank
from cluster.worker_messages import LateFrame, RouteChunk, SequenceStart, StepDescriptor, StepResult

Int32Array = npt.NDArray[np.int32]


class PrefixStore(Protocol):
    """See `prefix_store.store.PrefixStore`, which documents each method."""

    def match(self, namespace: Namespace, token_ids: Int32Array) -> PrefixMatch: ...

    def acquire(self, namespace: Namespace, token_ids: Int32Array, num_tokens: int) -> Lease: ...

    def release(self, lease: Lease) -> None: ...

    def kv_block_ids(self, lease: Lease, rank: Rank, num_tokens: int) -> list[BlockId]: ...

    def routes(self, lease: Lease, start: int, end: int) -> ExpertRoutes: ...

    def publish(
        self,
        lease: Lease,
        rank: Rank,
        token_ids: Int32Array,
        first_block: int,
        block_ids: list[BlockId],
        routes: ExpertRoutes,
    ) -> Publication: ...

    def scores(self, lease: Lease, start: int, end: int, num_listed: int = 1) -> TokenScores: ...

    def record_scores(self, lease: Lease, start: int, scores: TokenScores) -> int: ...

    def allocate(self, rank: Rank, num_blocks: int) -> list[BlockId] | None: ...

    def drop_kv(self, rank: Rank) -> int: ...

    def free(self, rank: Rank, block_ids: list[BlockId]) -> None: ...

    def num_allocatable(self, rank: Rank) -> int: ...

    def evict(self, part: EvictTarget) -> Eviction: ...

    def exchange_weights(self, model_fingerprint: str) -> Eviction: ...

    def upkeep(self) -> float | None: ...

    def when_settled(self, settled: Callable[[str], None]) -> None: ...

    def close(self, timeout_seconds: float) -> None: ...

    def stats(self) -> StoreStats: ...

    def check_invariants(self) -> None: ...


class Workers(Protocol):
    """All expert workers of the cell."""

    def start_sequence(self, rank: Rank, start: SequenceStart) -> None: ...

    def end_sequences(self, rank: Rank, seq_ids: list[int]) -> None: ...

    def send_routes(self, rank: Rank, chunk: RouteChunk) -> None:
        """Ahead of the step that names it; frames to one rank stay in order."""
        ...

    def execute(self, step: StepDescriptor) -> list[StepResult]:
        """Runs one step on every rank and returns all results, by rank.

        Raises RankLostError or DeadlineError, which name the rank that did not answer, or GroupBrokenError.
        """
        ...

    def frames(self, timeout_seconds: float) -> list[LateFrame]:
        """Frames that have arrived; waits up to the timeout for the first one."""
        ...
