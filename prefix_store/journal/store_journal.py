"""What a prefix store needs of whoever keeps it on disk, and the one of a store that nobody keeps."""

from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.prefix_match import StateOnDisk
from prefix_store.journal.restoring import RestoredTree
from prefix_store.lease import LeasedPath
from prefix_store.packed_routes import PackedRoutes
from prefix_store.radix_tree import RadixTree

Settled = Callable[[str], None]
"""Called when what was evicted is gone from disk: with an empty string, or with why it may not be."""


class StoreJournal(Protocol):
    """What a store tells of itself, and asks. Called by the store alone."""

    def load(self, into: RestoredTree, *, max_route_blocks: int, max_score_blocks: int) -> int:
        """What was kept, as much as fits, once and before anything else. Returns the last time that it knows of.
        Raises ConfigError."""
        ...

    def routes_added(
        self, path: LeasedPath, first_block: int, routes: PackedRoutes, stamp: int
    ) -> None:
        """Of blocks that are new under the path's keys. The routes may change afterwards."""
        ...

    def scores_added(self, path: LeasedPath, blocks: Sequence[int], stamp: int) -> None:
        """Blocks under the path whose scores are new or more than before, ascending."""
        ...

    def evicted(self) -> None:
        """By command: what is not in the tree any more must not come back."""
        ...

    def served(self, model_fingerprint: str) -> None:
        """Of other weights from now on; an eviction of everything follows."""
        ...

    def when_settled(self, settled: Settled) -> None:
        """Once evictions so far are true of the disk as well."""
        ...

    def upkeep(self, tree: RadixTree, num_route_blocks: int, num_score_blocks: int) -> float | None:
        """A slice of what is to be done beside the engine's work. Returns in how many seconds more is, at the
        latest; None: when something has been published."""
        ...

    def state(self) -> StateOnDisk | None: ...

    def close(self, timeout_seconds: float) -> None: ...


class NoJournal:
    """Of a store that lives as long as its process."""

    def load(self, into: RestoredTree, *, max_route_blocks: int, max_score_blocks: int) -> int:
        return 0

    def routes_added(
        self, path: LeasedPath, first_block: int, routes: PackedRoutes, stamp: int
    ) -> None: ...

    def scores_added(self, path: LeasedPath, blocks: Sequence[int], stamp: int) -> None: ...

    def evicted(self) -> None: ...

    def served(self, model_fingerprint: str) -> None: ...

    def when_settled(self, settled: Settled) -> None:
        settled("")

    def upkeep(self, tree: RadixTree, num_route_blocks: int, num_score_blocks: int) -> float | None:
        return None

    def state(self) -> StateOnDisk | None:
        return None

    def close(self, timeout_seconds: float) -> None: ...
