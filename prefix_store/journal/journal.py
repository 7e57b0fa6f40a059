"""Routes and scores on disk: the engine's side. Everything here is quick; the disk is the writer's thread's.

Files form generations. A snapshot begins a generation: from then on what is published goes into the new journal, while
the tree is walked through beside the engine's work. The files before it count until the snapshot is complete.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.errors import ConfigError
from cluster.log import logger
from cluster.prefix_match import StateOnDisk
from prefix_store.journal.directory import StateDirectory
from prefix_store.journal.entries import BeginGeneration, CompleteSnapshot, RouteRun, ScoreRun
from prefix_store.journal.loading import find_kept
from prefix_store.journal.records import BlockSizes, Header
from prefix_store.journal.restoring import RestoredTree
from prefix_store.journal.store_journal import Settled
from prefix_store.journal.tree_walk import TreeWalk
from prefix_store.journal.writer import JournalWriter, WriterLimits
from prefix_store.lease import LeasedPath
from prefix_store.packed_routes import PackedRoutes
from prefix_store.radix_tree import RadixNode, RadixTree, path_from_root

SLICE_SECONDS = 0.001
"""Of the engine's time, between two steps, for a snapshot."""
POLL_SECONDS = 0.02
"""While the engine has nothing else to do and the writer is at something."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 60.0
"""After an error, doubled with each that follows."""
SETTLE_SECONDS = 10.0
"""A disk that has not removed files after so long is said to have failed at it."""
MIN_FILL = 3
"""Full stores that must fit into the bound: a snapshot, the journal behind it, and the next snapshot."""
_MIN_JOURNAL_BYTES = 2**22
"""A journal below it is no reason for a snapshot, however little is alive."""
_MAX_FILES = 8
"""Found at a start: more are written anew as one."""
_MIN_SECONDS_BETWEEN = 1.0

_LOG = logger("journal")


@dataclass(frozen=True)
class _Unsettled:
    generation: int
    """Files before it must be gone."""
    deadline: float
    settled: Settled


class Journal:
    """Owner of the directory, its writer and the walk of a snapshot."""

    def __init__(
        self,
        directory: StateDirectory,
        header: Header,
        sizes: BlockSizes,
        limits: WriterLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises OSError if the directory cannot be read."""
        self._directory = directory
        self._header = header
        self._sizes = sizes
        self._max_bytes = limits.max_bytes
        self._clock = clock
        self._generation = max((file.generation for file in directory.files()), default=0)
        self._writer = JournalWriter(directory, sizes, limits, clock=clock)
        self._walk: TreeWalk | None = None
        self._snapshot_generation = 0
        """Of the last snapshot that was begun."""
        self._is_owed = False
        """A snapshot, because there is something in the tree that is not on disk, or too much on disk."""
        self._drops_earlier = False
        """What was on disk before an eviction must go."""
        self._not_before = clock()
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._failure_seen = self._snapshots_seen = 0
        self._unsettled: list[_Unsettled] = []
        self._num_refused = 0
        self._is_behind = False
        self._blocks_loaded = 0

    def load(self, into: RestoredTree, *, max_route_blocks: int, max_score_blocks: int) -> int:
        started = self._clock()
        try:
            with _no_collections():
                kept = find_kept(self._directory, self._header, self._sizes)
                kept.keep_newest(max_route_blocks, max_score_blocks)
                into.fill(kept)
            aside = self._directory.newest_generation_aside()
        except OSError as error:
            raise ConfigError(
                f"--state-dir {self._directory.path}: {error.strerror or error}"
            ) from error
        self._blocks_loaded = kept.num_route_blocks
        self._generation = max([self._generation, aside, *(file.generation for file in kept.files)])
        self._begin(with_snapshot=False, expected_bytes=0)
        expected = self._sizes.stored_bytes(kept.num_route_blocks, kept.num_score_blocks)
        self._is_owed = (
            len(kept.files) > _MAX_FILES or kept.num_bytes > 2 * expected + _MIN_JOURNAL_BYTES
        )
        _LOG.info(
            "state loaded dir=%s route_blocks=%d of %d score_blocks=%d bytes=%d seconds=%.2f",
            self._directory.path,
            kept.num_route_blocks,
            kept.num_found,
            kept.num_score_blocks,
            kept.num_bytes,
            self._clock() - started,
        )
        return kept.last_stamp

    # --- what the store tells

    def routes_added(
        self, path: LeasedPath, first_block: int, routes: PackedRoutes, stamp: int
    ) -> None:
        ids, weights, namespace = routes.topk_ids[:], routes.topk_weights[:], path.namespace
        self._put(RouteRun(namespace, path.keys.data, first_block, ids, weights, stamp, False))

    def scores_added(self, path: LeasedPath, blocks: Sequence[int], stamp: int) -> None:
        rows: list[bytes] = []
        for node in path_from_root(path.end_node, blocks[0]):
            scores, first = node.payload.scores, node.first_block
            rows += [scores[block - first] for block in blocks if first <= block < node.end_block]
        namespace, tokens = path.namespace, path.keys.data
        self._put(ScoreRun(namespace, tokens, list(blocks), rows, stamp, False))

    def evicted(self) -> None:
        self._walk = None
        self._drops_earlier = True
        self._begin(with_snapshot=False, expected_bytes=0)
        self._is_owed, self._not_before = True, self._clock()

    def served(self, model_fingerprint: str) -> None:
        self._header = self._header.of_weights(model_fingerprint)

    def when_settled(self, settled: Settled) -> None:
        if not self._drops_earlier:
            settled("")
            return
        deadline = self._clock() + SETTLE_SECONDS
        self._unsettled.append(_Unsettled(self._generation, deadline, settled))

    # --- beside the engine's work

    def upkeep(self, tree: RadixTree, num_route_blocks: int, num_score_blocks: int) -> float | None:
        now = self._clock()
        self._see_failure(now)
        self._settle(now)
        if not self._is_writing_snapshot and now >= self._not_before:
            expected = self._sizes.stored_bytes(num_route_blocks, num_score_blocks)
            if self._is_owed or self._writer.journal_bytes > self._largest_journal(expected):
                self._begin_snapshot(tree, expected, now)
        if self._walk is not None:
            self._advance(self._walk, now)
        return self._seconds_to_next(now)

    def state(self) -> StateOnDisk:
        writer = self._writer
        return StateOnDisk(
            directory=str(self._directory.path),
            num_bytes=writer.file_bytes,
            waiting_bytes=writer.waiting_bytes,
            snapshots=writer.num_snapshots,
            runs_dropped=self._num_refused + writer.num_lost,
            blocks_loaded=self._blocks_loaded,
            error=writer.error,
        )

    def close(self, timeout_seconds: float) -> None:
        """Writes and syncs what was published. A snapshot that is not complete is left: what was on disk before counts.
        A disk that takes longer is left to itself, and with it the lock, until the process ends."""
        self._walk = None
        is_done = self._writer.close(timeout_seconds)
        self._settle(math.inf)
        if is_done:
            self._directory.close()
        else:
            _LOG.warning("state is not written after seconds=%.1f", timeout_seconds)

    def _largest_journal(self, expected_bytes: int) -> int:
        """As large as a snapshot would be; with that one and the one before it, it has to fit."""
        return min(max(expected_bytes, _MIN_JOURNAL_BYTES), self._max_bytes // MIN_FILL)

    @property
    def _is_writing_snapshot(self) -> bool:
        generation = self._snapshot_generation
        done = max(self._writer.completed_generation, self._writer.failed_generation)
        return self._walk is not None or (generation == self._generation and done < generation)

    def _begin(self, *, with_snapshot: bool, expected_bytes: int) -> None:
        self._generation += 1
        self._writer.command(
            BeginGeneration(
                self._generation,
                self._header,
                drops_earlier=self._drops_earlier,
                with_snapshot=with_snapshot,
                expected_bytes=expected_bytes,
            )
        )

    def _begin_snapshot(self, tree: RadixTree, expected_bytes: int, now: float) -> None:
        self._is_owed = False
        self._not_before = now + _MIN_SECONDS_BETWEEN
        self._begin(with_snapshot=True, expected_bytes=expected_bytes)
        self._snapshot_generation = self._generation
        self._walk = TreeWalk(tree)

    def _advance(self, walk: TreeWalk, now: float) -> None:
        """At least a node, if the writer has room."""
        while self._writer.has_room:
            path = walk.next_path()
            if not path:
                self._writer.command(CompleteSnapshot())
                self._walk = None
                return
            for node in path:
                self._put_node(node)
            if self._clock() - now >= SLICE_SECONDS:
                return

    def _put_node(self, node: RadixNode) -> None:
        if not node.num_blocks:
            return
        payload, first, namespace = node.payload, node.first_block, node.namespace
        tokens = b"".join([part.edge for part in path_from_root(node)])
        ids, weights = payload.routes.topk_ids[:], payload.routes.topk_weights[:]
        stamp = payload.route_stamp
        self._writer.put(RouteRun(namespace, tokens, first, ids, weights, stamp, True))
        if payload.scores:
            places = sorted(payload.scores)
            blocks, rows = [first + p for p in places], [payload.scores[p] for p in places]
            self._writer.put(ScoreRun(namespace, tokens, blocks, rows, stamp, True))

    def _put(self, run: RouteRun | ScoreRun) -> None:
        """Or not, if nothing can be written or too much waits: then a snapshot makes it good."""
        if self._writer.has_room_for(run) and self._writer.failed_generation < self._generation:
            self._writer.put(run)
            return
        self._num_refused += 1
        self._is_owed = True
        if not self._is_behind and not self._writer.error:
            self._is_behind = True
            _LOG.warning(
                "the disk falls behind, what is published is not kept until the next snapshot dir=%s",
                self._directory.path,
            )

    def _see_failure(self, now: float) -> None:
        if self._writer.num_snapshots > self._snapshots_seen:
            self._snapshots_seen = self._writer.num_snapshots
            self._retry_seconds, self._is_behind = FIRST_RETRY_SECONDS, False
        failed = self._writer.failed_generation
        if failed == self._generation and failed > self._failure_seen:
            self._failure_seen = failed
            self._walk, self._is_owed = None, True
            self._not_before = now + self._retry_seconds
            self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)

    def _settle(self, now: float) -> None:
        """Evictions whose files are gone, or are not in time."""
        waiting, self._unsettled = self._unsettled, []
        for item in waiting:
            if self._writer.dropped_before >= item.generation:
                item.settled("")
            elif self._writer.failed_generation >= item.generation:
                item.settled(self._writer.error)
            elif now > item.deadline:
                item.settled(f"the disk did not answer within {SETTLE_SECONDS:g} s")
            else:
                self._unsettled.append(item)
        if self._writer.dropped_before >= self._generation:
            self._drops_earlier = False

    def _seconds_to_next(self, now: float) -> float | None:
        if self._walk is not None and self._writer.has_room:
            return 0.0
        if self._writer.is_busy or self._is_writing_snapshot or self._unsettled:
            return POLL_SECONDS
        return max(0.0, self._not_before - now) if self._is_owed else None


@contextmanager
def _no_collections() -> Iterator[None]:
    """Little of what a load makes is garbage, and each full collection would look at all of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
