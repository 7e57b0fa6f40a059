"""The plain twin of the prefix store: a dict from (namespace, token prefix) to one record per block. No tree, no queue.

It predicts everything that the store answers, block by block and by scanning, evictions included. Which free block ids
an allocation hands out is the one thing it is told.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.routes import ExpertRoutes

Tokens = tuple[int, ...]
Key = tuple[str, Tokens]
"""Namespace and all tokens up to the end of the block."""


@dataclass
class BlockRecord:
    routes: ExpertRoutes
    used: int
    kv: dict[int, int] = field(default_factory=dict)
    """Rank to block id."""
    kv_used: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class NaiveLease:
    namespace: str
    tokens: Tokens
    """Exactly the protected ones."""
    ranks: set[int] = field(default_factory=set)
    conflicted: bool = False


class NaivePrefixMap:
    def __init__(
        self, *, num_ranks: int, num_kv_blocks: int, block_size: int, max_route_blocks: int
    ) -> None:
        self.block_size = block_size
        self.max_route_blocks = max_route_blocks
        self.records: dict[Key, BlockRecord] = {}
        self.leases: list[NaiveLease] = []
        self.num_free = [num_kv_blocks] * num_ranks
        self.now = 0

    def keys(self, namespace: str, tokens: Tokens) -> list[Key]:
        """One key per full block."""
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return [(namespace, tokens[:end]) for end in ends]

    def is_leased(self, key: Key) -> bool:
        namespace, tokens = key
        return any(
            lease.namespace == namespace and lease.tokens[: len(tokens)] == tokens
            for lease in self.leases
        )

    def num_route_tokens(self, namespace: str, tokens: Tokens) -> int:
        return self._run(namespace, tokens, lambda record: True)

    def num_kv_tokens(self, namespace: str, tokens: Tokens, rank: int) -> int:
        return self._run(namespace, tokens, lambda record: rank in record.kv)

    def _run(self, namespace: str, tokens: Tokens, counts: Callable[[BlockRecord], bool]) -> int:
        blocks = 0
        for key in self.keys(namespace, tokens):
            if key not in self.records or not counts(self.records[key]):
                break
            blocks += 1
        return blocks * self.block_size

    def acquire(self, namespace: str, tokens: Tokens) -> NaiveLease:
        lease = NaiveLease(namespace, tokens)
        self.leases.append(lease)
        return lease

    def release(self, lease: NaiveLease) -> None:
        self.leases.remove(lease)
        self.now += 1
        for key in self.keys(lease.namespace, lease.tokens):
            record = self.records[key]
            record.used = self.now
            for rank in lease.ranks & record.kv.keys():
                record.kv_used[rank] = self.now

    def publish(
        self,
        lease: NaiveLease,
        rank: int,
        tokens: Tokens,
        first_block: int,
        block_ids: list[int],
        routes: list[ExpertRoutes],
    ) -> list[str]:
        """Outcomes of the blocks."""
        keys = self.keys(lease.namespace, tokens)
        before = keys[:first_block]
        leased = len(lease.tokens) // self.block_size
        complete = all(key in self.records and rank in self.records[key].kv for key in before)
        if lease.conflicted or first_block > leased or not complete:
            return ["private"] * len(block_ids)
        self.now += 1
        lease.ranks.add(rank)
        outcomes: list[str] = []
        for key, block_id, made_with in zip(keys[first_block:], block_ids, routes, strict=False):
            outcome = self._publish_block(lease, rank, key, block_id, made_with)
            if outcome == "private":
                break
            outcomes.append(outcome)
            lease.tokens = max(lease.tokens, key[1], key=len)
        return outcomes + ["private"] * (len(block_ids) - len(outcomes))

    def _publish_block(
        self, lease: NaiveLease, rank: int, key: Key, block_id: int, routes: ExpertRoutes
    ) -> str:
        if key not in self.records:
            if not self._make_route_room():
                return "private"
            self.records[key] = BlockRecord(routes, self.now)
        record = self.records[key]
        if not record.routes.same_ids(routes):
            lease.conflicted = True
            return "private"
        if rank in record.kv:
            return "duplicate"
        record.kv[rank] = block_id
        record.kv_used[rank] = self.now
        return "added"

    def _make_route_room(self) -> bool:
        while len(self.records) >= self.max_route_blocks:
            candidates = [
                key
                for key, record in self.records.items()
                if not record.kv and not self.is_leased(key) and not self._children(key)
            ]
            if not candidates:
                return False
            del self.records[min(candidates, key=lambda key: self.records[key].used)]
        return True

    def num_allocatable(self, rank: int) -> int:
        held = [key for key, record in self.records.items() if rank in record.kv]
        return self.num_free[rank] + sum(not self.is_leased(key) for key in held)

    def allocate(self, rank: int, num_blocks: int) -> list[int] | None:
        """The block ids that must have been evicted for it, or None if there are too few."""
        if num_blocks > self.num_allocatable(rank):
            return None
        evicted = []
        while self.num_free[rank] < num_blocks:
            evicted.append(self._evict_oldest_kv(rank))
            self.num_free[rank] += 1
        self.num_free[rank] -= num_blocks
        return evicted

    def _evict_oldest_kv(self, rank: int) -> int:
        candidates = [
            key
            for key, record in self.records.items()
            if rank in record.kv
            and not self.is_leased(key)
            and not any(rank in self.records[child].kv for child in self._children(key))
        ]
        record = self.records[min(candidates, key=lambda key: self.records[key].kv_used[rank])]
        return record.kv.pop(rank)

    def _children(self, key: Key) -> list[Key]:
        namespace, tokens = key
        length = len(tokens) + self.block_size
        return [
            other
            for other in self.records
            if other[0] == namespace
            and len(other[1]) == length
            and other[1][: len(tokens)] == tokens
        ]

    def drop_kv(self, rank: int) -> int:
        held = [record for record in self.records.values() if rank in record.kv]
        for record in held:
            del record.kv[rank], record.kv_used[rank]
        self.num_free[rank] += len(held)
        return len(held)

    def free(self, rank: int, block_ids: list[int]) -> None:
        self.num_free[rank] += len(block_ids)

    def evict(self, part: str) -> None:
        for key in [key for key in self.records if not self.is_leased(key)]:
            for rank in list(self.records[key].kv):
                self.records[key].kv.pop(rank)
                self.num_free[rank] += 1
            if part != "kv":
                del self.records[key]
