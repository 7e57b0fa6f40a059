"""What may be evicted, in which order: pure rules over nodes, and a queue that finds the oldest without a scan."""

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from typing import Generic, TypeVar

from cluster.types import Rank
from prefix_store.radix_tree import RadixNode

T = TypeVar("T")
_MIN_LIMIT = 64


def kv_eviction_stamp(node: RadixNode, rank: Rank) -> int | None:
    """Last use of the node's KV on this rank if its last block may go now, else None.

    Not while leased, and not before the children's: KV on a rank is contiguous from the root.
    """
    if node.num_leases or rank in node.num_kv_children:
        return None
    return node.payload.kv_stamps.get(rank)


def route_eviction_stamp(node: RadixNode) -> int | None:
    """Last use of the node's routes if its last block may go now, else None.

    Only from leaves without lease, and never from under KV: KV goes first, routes live longer.
    """
    payload = node.payload
    if node.num_leases or node.children or len(payload.routes) == payload.num_blocks_with_kv:
        return None
    return payload.route_stamp


def score_eviction_stamp(node: RadixNode) -> int | None:
    """Last use of the node if it has scores that may go now, else None. Nothing depends on them."""
    payload = node.payload
    return None if node.num_leases or not payload.scores else payload.route_stamp


def oldest_by_scan(items: Iterable[T], stamp_of: Callable[[T], int | None]) -> T | None:
    """The plain twin of LruQueue.oldest."""
    stamped = [(stamp, item) for item in items if (stamp := stamp_of(item)) is not None]
    return min(stamped, key=lambda pair: pair[0])[1] if stamped else None


class LruQueue(Generic[T]):
    """Candidates for eviction by last use. Lazy: an entry whose stamp is no longer the item's is skipped when met.

    The owner offers an item whenever it may have become a candidate. Entries number at most twice the candidates (or
    64): beyond that the stale ones are thrown out, which is O(1) per offer on average.
    """

    def __init__(self, stamp_of: Callable[[T], int | None]) -> None:
        self._stamp_of = stamp_of
        self._heap: list[tuple[int, int, T]] = []
        self._order = count()
        self._limit = _MIN_LIMIT

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, item: T) -> None:
        """Takes the item in if it is a candidate now."""
        stamp = self._stamp_of(item)
        if stamp is None:
            return
        heapq.heappush(self._heap, (stamp, next(self._order), item))
        if len(self._heap) > self._limit:
            self.drop_stale()

    def oldest(self) -> T | None:
        """The candidate used longest ago; it stays in the queue until it is no candidate any more."""
        while self._heap:
            stamp, _, item = self._heap[0]
            if self._stamp_of(item) == stamp:
                return item
            heapq.heappop(self._heap)
        return None

    def items(self) -> set[T]:
        """All candidates with an entry, O(n): for tests and invariants. Items hash by identity."""
        return {item for stamp, _, item in self._heap if self._stamp_of(item) == stamp}

    def drop_stale(self) -> None:
        """O(n). Entries keep what they name in memory: for after many items have gone at once."""
        current = {
            id(entry[2]): entry for entry in self._heap if self._stamp_of(entry[2]) == entry[0]
        }
        self._heap = list(current.values())
        heapq.heapify(self._heap)
        self._limit = max(_MIN_LIMIT, 2 * len(self._heap))
