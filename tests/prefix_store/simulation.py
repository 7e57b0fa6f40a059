"""Random requests against a PrefixStore and the naive map side by side, over a KV memory that remembers contents."""

import random
import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest

from cluster.errors import StoreError
from cluster.prefix_match import Lease
from cluster.routes import ExpertRoutes
from cluster.scores import ALTERNATIVE_BYTES, SCORE_BYTES, TokenScores
from cluster.types import BlockId, EvictTarget, Namespace, Rank
from tests.prefix_store.builders import (
    BLOCK_SIZE,
    KV_BYTES_PER_BLOCK,
    SHAPE,
    gate,
    make_store,
    route_block_bytes,
)
from tests.reference.naive_prefix_map import NaiveLease, NaivePrefixMap, Tokens

NUM_RANKS = 2
NUM_KV_BLOCKS = 16
MAX_ROUTE_BLOCKS = NUM_RANKS * NUM_KV_BLOCKS
MAX_SCORE_BLOCKS = 16
MAX_LISTED = 4
MAX_SCORE_BYTES = MAX_SCORE_BLOCKS * BLOCK_SIZE * SCORE_BYTES
MAX_BLOCK_BYTES = BLOCK_SIZE * (SCORE_BYTES + (MAX_LISTED - 1) * ALTERNATIVE_BYTES)
NAMESPACES = [Namespace("a"), Namespace("b"), Namespace("b-salted")]
MAX_REQUESTS = 5

Content = tuple[Namespace, Tokens, bytes]
"""What a KV block depends on: the tokens up to its end and the expert ids of all of them."""


@dataclass(eq=False)
class SimulatedRequest:
    namespace: Namespace
    tokens: Tokens
    rank: Rank
    lease: Lease
    naive_lease: NaiveLease
    routes: list[ExpertRoutes]
    """Of every block with KV, cached or computed."""
    num_published: int
    computed: list[BlockId] = field(default_factory=list)
    """Not yet offered to the store."""
    private: list[BlockId] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return len(self.tokens) // BLOCK_SIZE


class Simulation:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = make_store(
            num_ranks=NUM_RANKS,
            num_kv_blocks=NUM_KV_BLOCKS,
            max_route_blocks=MAX_ROUTE_BLOCKS,
            max_score_blocks=MAX_SCORE_BLOCKS,
        )
        self.naive = NaivePrefixMap(
            num_ranks=NUM_RANKS,
            num_kv_blocks=NUM_KV_BLOCKS,
            block_size=BLOCK_SIZE,
            max_route_blocks=MAX_ROUTE_BLOCKS,
        )
        self.requests: list[SimulatedRequest] = []
        self.memory: dict[tuple[Rank, BlockId], Content] = {}
        self.prompts: list[Tokens] = [()]
        self.seen: dict[str, int] = {}

    def run(self, num_operations: int) -> None:
        operations = [
            (self.start, 300),
            (self.compute, 300),
            (self.publish, 300),
            (self.finish, 110),
            (self.score, 150),
            (self.exhaust, 20),
            (self.probe, 50),
            (self.evict, 3),
            (self.lose_rank, 3),
            (self.misuse, 30),
        ]
        actions, weights = zip(*operations, strict=True)
        for _ in range(num_operations):
            self.random.choices(actions, weights)[0]()
            self.store.check_invariants()
            self.compare_sizes()
            self.compare_all_matches()

    def drain(self) -> None:
        """Ends every request and evicts everything."""
        while self.requests:
            self.finish()
        self.store.evict("all")
        self.naive.evict("all")
        self.store.check_invariants()

    # Operations

    def start(self) -> None:
        if len(self.requests) == MAX_REQUESTS:
            return
        namespace, token_ids = self.random.choice(NAMESPACES), self._prompt()
        match = self.store.match(namespace, np.array(token_ids, np.int32))
        rank = Rank(self.random.randrange(NUM_RANKS))
        num_tokens = self.random.choice(
            [match.num_route_tokens, match.num_kv_tokens[rank], self._cut(match.num_route_tokens)]
        )
        lease = self.store.acquire(namespace, np.array(token_ids, np.int32), num_tokens)
        naive_lease = self.naive.acquire(namespace, token_ids[:num_tokens])
        self._check_routes(lease, token_ids)
        self._check_scores(lease, token_ids)
        num_kv = self._cut(min(num_tokens, match.num_kv_tokens[rank]))
        block_ids: list[BlockId] = []
        if num_kv:
            block_ids = self.store.kv_block_ids(lease, rank, num_kv)
            naive_lease.ranks.add(rank)
        routes = self._check_kv(namespace, token_ids, rank, block_ids)
        self.requests.append(
            SimulatedRequest(namespace, token_ids, rank, lease, naive_lease, routes, len(routes))
        )

    def compute(self) -> None:
        """Some of a request's next blocks: replayed where its lease has routes (mostly), else by the gate."""
        request = self._some_request([r for r in self.requests if len(r.routes) < r.num_blocks])
        if request is None:
            return
        remaining = request.num_blocks - len(request.routes)
        count = self.random.randint(min(1, remaining), min(4, remaining))
        block_ids = self._allocate(request.rank, count)
        for block_id in block_ids or []:
            self._write(request, block_id)

    def publish(self) -> None:
        request = self._some_request([r for r in self.requests if r.computed] or self.requests)
        if request is None:
            return
        count = self.random.choice(
            [len(request.computed), self.random.randint(0, len(request.computed))]
        )
        block_ids = [request.computed.pop(0) for _ in range(count)]
        first = request.num_published
        routes = request.routes[first : first + count]
        end = self.random.randint((first + count) * BLOCK_SIZE, len(request.tokens))
        known = request.tokens[: max(end, request.lease.num_tokens)]
        had_conflict = request.naive_lease.conflicted
        expected = self.naive.publish(
            request.naive_lease, request.rank, known, first, block_ids, routes
        )
        offered = ExpertRoutes.concatenate(routes, SHAPE)
        publication = self.store.publish(
            request.lease, request.rank, np.array(known, np.int32), first, block_ids, offered
        )
        assert list(publication.outcomes) == expected
        assert publication.conflict == (request.naive_lease.conflicted and not had_conflict)
        assert request.lease.num_tokens == len(request.naive_lease.tokens)
        request.num_published += count
        for outcome, block_id in zip(publication.outcomes, block_ids, strict=True):
            self._count(outcome)
            if outcome != "added":
                request.private.append(block_id)
        self._count("conflict" if publication.conflict else "no conflict")

    def score(self) -> None:
        """Some tokens under a lease get scores, which are a function of the prefix; some of them nobody asked for, and
        some list fewer alternatives than others."""
        request = self._some_request(self.requests)
        if request is None:
            return
        start = self.random.randint(0, request.lease.num_tokens)
        end = self.random.randint(start, request.lease.num_tokens)
        whole = _scores_of(request.namespace, request.tokens, start, end, MAX_LISTED)
        scores = TokenScores.unknown(end - start, self.random.choice([0, 0, 1, MAX_LISTED - 1]))
        for place in range(end - start):
            if self.random.random() < 0.67:
                part = whole.slice(place, place + 1).columns(MAX_LISTED)
                scores.fill(place, part.stored(self.random.randint(1, MAX_LISTED)))
        before = self.store.scores(request.lease, start, end, MAX_LISTED).num_listed
        taken = self.store.record_scores(request.lease, start, scores)
        after = self.store.scores(request.lease, start, end, MAX_LISTED).num_listed
        assert taken <= int((scores.num_listed > before).sum())
        assert (after >= before).all()
        if self.store.stats().score_bytes < MAX_SCORE_BYTES - MAX_BLOCK_BYTES * (1 + len(after)):
            assert (after == np.maximum(before, scores.num_listed)).all()
            self._count("scored with room")
        self._count("more listed" if (after > before)[before > 0].any() else "no more listed")
        self._count("scored" if taken else "nothing to score")
        self._check_scores(request.lease, request.tokens)

    def finish(self) -> None:
        request = self._some_request(self.requests)
        if request is not None:
            self._end(request)

    def lose_rank(self) -> None:
        """Whoever is on it goes, and then its KV; the routes that made it stay."""
        rank = Rank(self.random.randrange(NUM_RANKS))
        users = [request for request in self.requests if request.rank == rank]
        if any(request.naive_lease.ranks for request in users):
            with pytest.raises(StoreError, match="leases use it"):
                self.store.drop_kv(rank)
        for request in users:
            self._end(request)
        num_blocks = self.store.drop_kv(rank)
        assert num_blocks == self.naive.drop_kv(rank)
        assert self.store.stats().kv_blocks_free[rank] == NUM_KV_BLOCKS
        self._count("lost KV" if num_blocks else "lost nothing")

    def _end(self, request: SimulatedRequest) -> None:
        self.requests.remove(request)
        self.store.release(request.lease)
        self.naive.release(request.naive_lease)
        self._free(request.rank, request.private + request.computed)
        with pytest.raises(StoreError, match="was released"):
            self.store.release(request.lease)

    def exhaust(self) -> None:
        """Takes everything that a rank can give, and gives it back."""
        rank = Rank(self.random.randrange(NUM_RANKS))
        available = self.store.num_allocatable(rank)
        assert self._allocate(rank, available + 1) is None
        block_ids = self._allocate(
            rank, available if self.random.random() < 0.2 else available // 3
        )
        assert block_ids is not None
        for block_id in block_ids:
            self.memory[rank, block_id] = (NAMESPACES[0], (-1,), b"")
        self._free(rank, block_ids)

    def probe(self) -> None:
        """Sequences that nobody may ever have written."""
        for namespace in NAMESPACES:
            self._compare_match(namespace, self._prompt())

    def evict(self) -> None:
        part: EvictTarget = self.random.choice(["kv", "kv", "routes", "scores", "all"])
        before = self.store.stats()
        eviction = self.store.evict(part)
        if part != "scores":
            self.naive.evict(part)
        after = self.store.stats()
        freed = before.kv_bytes + before.route_bytes - after.kv_bytes - after.route_bytes
        assert eviction.num_bytes == freed + before.score_bytes - after.score_bytes

    def misuse(self) -> None:
        """Frees blocks of the tree and free ones: refused, and nothing changes (the comparison after it would see)."""
        rank = Rank(self.random.randrange(NUM_RANKS))
        owned = {b for r in self.requests if r.rank == rank for b in r.private + r.computed}
        block_id = BlockId(self.random.randrange(NUM_KV_BLOCKS))
        if block_id in owned:
            return
        with pytest.raises(StoreError, match="only blocks that were"):
            self.store.free(rank, [*owned, block_id])

    # Comparisons

    def compare_sizes(self) -> None:
        stats = self.store.stats()
        records = self.naive.records
        leased = [r for key, r in records.items() if self.naive.is_leased(key)]
        assert list(stats.kv_blocks_free) == self.naive.num_free
        assert stats.kv_blocks_leased == sum(len(record.kv) for record in leased)
        assert stats.kv_bytes == KV_BYTES_PER_BLOCK * sum(len(r.kv) for r in records.values())
        assert stats.route_bytes == route_block_bytes() * len(records)
        for rank in range(NUM_RANKS):
            assert self.store.num_allocatable(Rank(rank)) == self.naive.num_allocatable(rank)

    def compare_all_matches(self) -> None:
        for namespace, token_ids in self.naive.records:
            self._compare_match(Namespace(namespace), token_ids)

    def _compare_match(self, namespace: Namespace, token_ids: Tokens) -> None:
        match = self.store.match(namespace, np.array(token_ids, np.int32))
        ranks = range(NUM_RANKS)
        assert match.num_route_tokens == self.naive.num_route_tokens(namespace, token_ids)
        assert match.num_kv_tokens == tuple(
            self.naive.num_kv_tokens(namespace, token_ids, rank) for rank in ranks
        )

    def _check_routes(self, lease: Lease, token_ids: Tokens) -> None:
        """Any range of the lease gives the routes that were published first."""
        start = self.random.randint(0, lease.num_tokens)
        end = self.random.randint(start, lease.num_tokens)
        got = self.store.routes(lease, start, end)
        keys = self.naive.keys(lease.namespace, token_ids[: lease.num_tokens])
        records = [self.naive.records[key].routes for key in keys]
        expected = ExpertRoutes.concatenate(records, SHAPE).slice(start, end)
        assert np.array_equal(got.topk_ids, expected.topk_ids)
        assert np.array_equal(got.topk_weights, expected.topk_weights)

    def _check_scores(self, lease: Lease, token_ids: Tokens) -> None:
        """What is known is what the prefix has, in whatever range it is read."""
        start = self.random.randint(0, lease.num_tokens)
        end = self.random.randint(start, lease.num_tokens)
        found = self.store.scores(lease, start, end, self.random.randint(1, MAX_LISTED))
        expected = _scores_of(lease.namespace, token_ids, start, end, MAX_LISTED)
        assert found.rows[found.known].tolist() == expected.rows[found.known].tolist()
        if found.further is not None:
            there = found.further["token_id"] >= 0
            listed = expected.further[:, : found.num_further]
            assert found.further[there].tolist() == listed[there].tolist()

    def _check_kv(
        self, namespace: Namespace, token_ids: Tokens, rank: Rank, block_ids: list[BlockId]
    ) -> list[ExpertRoutes]:
        """Matched blocks hold exactly these tokens' KV, computed with exactly the recorded ids. Returns the routes."""
        routes: list[ExpertRoutes] = []
        for key, block_id in zip(self.naive.keys(namespace, token_ids), block_ids, strict=False):
            record = self.naive.records[key]
            routes.append(record.routes)
            assert record.kv[rank] == block_id
            assert self.memory[rank, block_id] == (namespace, key[1], _ids(routes))
        return routes

    # Parts

    def _prompt(self) -> Tokens:
        """Some earlier prompt's beginning, of any length, and a few tokens of a small alphabet."""
        running = [request.tokens for request in self.requests]
        base = self.random.choice([*self.prompts, *running, *running])
        if self.random.random() < 0.6:
            return base
        base = base[: self.random.randint(0, len(base))]
        own = [self.random.randrange(3) for _ in range(self.random.randint(0, 4 * BLOCK_SIZE))]
        prompt = (*base, *own)[: 9 * BLOCK_SIZE + 1]
        self.prompts = [*self.prompts[-12:], prompt]
        return prompt

    def _cut(self, num_tokens: int) -> int:
        """Some whole number of blocks of so many, mostly all."""
        if self.random.random() < 0.7:
            return num_tokens
        return self.random.randint(0, num_tokens // BLOCK_SIZE) * BLOCK_SIZE

    def _some_request(self, requests: list[SimulatedRequest]) -> SimulatedRequest | None:
        return self.random.choice(requests) if requests else None

    def _allocate(self, rank: Rank, count: int) -> list[BlockId] | None:
        evicted = self.naive.allocate(rank, count)
        block_ids = self.store.allocate(rank, count)
        assert (block_ids is None) == (evicted is None)
        if block_ids is None or evicted is None:
            self._count("nothing to allocate")
            return None
        assert len(block_ids) == count
        assert set(evicted) <= set(block_ids)
        self._count("evicted" if evicted else "not evicted")
        held = {record.kv.get(rank) for record in self.naive.records.values()}
        held |= {b for r in self.requests if r.rank == rank for b in r.private + r.computed}
        assert held.isdisjoint(block_ids)
        return block_ids

    def _free(self, rank: Rank, block_ids: list[BlockId]) -> None:
        self.store.free(rank, block_ids)
        self.naive.free(rank, block_ids)

    def _write(self, request: SimulatedRequest, block_id: BlockId) -> None:
        end = (len(request.routes) + 1) * BLOCK_SIZE
        prefix = request.tokens[:end]
        if end <= request.lease.num_tokens and self.random.random() < 0.9:
            routes = self.store.routes(request.lease, end - BLOCK_SIZE, end)
        else:
            variant = int(self.random.random() < 0.15)
            routes = gate(np.array(prefix, np.int32), variant=variant)
        request.routes.append(routes)
        request.computed.append(block_id)
        self.memory[request.rank, block_id] = (request.namespace, prefix, _ids(request.routes))

    def _count(self, event: str) -> None:
        self.seen[event] = self.seen.get(event, 0) + 1


def _scores_of(
    namespace: Namespace, token_ids: Tokens, start: int, end: int, num_listed: int
) -> TokenScores:
    scores = TokenScores.unknown(end - start, num_listed - 1)
    for place in range(end - start):
        prefix = (namespace, token_ids[: start + place + 1])
        digest = zlib.crc32(repr(prefix).encode())
        rank = 1 + digest % 7
        scores.rows[place] = -(digest % 1000) / 8, rank, digest % 97, -(digest % 10) / 8
        for number in range(num_listed - 1):
            scores.further[place, number] = digest % 89 + number, -(digest % 11) - number
    return scores


def _ids(routes: list[ExpertRoutes]) -> bytes:
    return b"".join(part.topk_ids.tobytes() for part in routes)
