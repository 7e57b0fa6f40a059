"""Which tokens of which requests the next step computes. Owner of the waiting and running requests.

No prefill or decode phase: every running request has tokens known and tokens computed, and each step closes part of the
gap under a token budget per rank (vLLM v1). First come, first served; the youngest is preempted when blocks run out.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

from cluster.config import SchedulerSection
from cluster.prefix_match import Lease, PrefixMatch
from cluster.types import Rank
from router_service.clients import PrefixStore
from router_service.rank_selection import SEQUENCE_COST, RankCandidate, select_home_rank
from router_service.request import Request

WAITING_WINDOW = 256
"""Waiting requests that one schedule looks at, from the oldest."""


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens [first_position, first_position + num_tokens) of a request in one step, all replayed or none."""

    request: Request
    first_position: int
    num_tokens: int
    replays: bool

    @property
    def samples(self) -> bool:
        return self.first_position + self.num_tokens == self.request.num_tokens


@dataclass(frozen=True)
class Schedule:
    """chunks by home rank; admitted requests need their sampling parameters sent before the step."""

    chunks: list[ScheduledChunk]
    admitted: list[Request]
    preempted: list[tuple[Rank, Request]]


@dataclass(frozen=True)
class SchedulerLimits:
    num_ranks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_waiting: int
    route_replay: bool

    @staticmethod
    def from_config(
        section: SchedulerSection, *, num_ranks: int, block_size: int, route_replay: bool
    ) -> "SchedulerLimits":
        return SchedulerLimits(
            num_ranks,
            block_size,
            section.max_num_batched_tokens,
            section.max_num_seqs,
            section.max_num_waiting,
            route_replay,
        )


class _InFlight:
    """Full prompt blocks that requests compute, or have computed, and have not offered to the store yet, by key."""

    def __init__(self, requests: Iterable[Request], block_size: int) -> None:
        self._block_size = block_size
        self.anywhere: dict[bytes, Request] = {}
        self.on_rank: dict[tuple[Rank, bytes], Request] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        assert request.home_rank is not None
        if not request.publishing:
            return
        # what was offered and refused will not come; what is not computed of an ended request neither
        first = max(request.num_published_blocks, request.num_offered_blocks)
        ended = request.finish_reason is not None
        end = request.num_computed_tokens // self._block_size if ended else None
        for key in request.prompt_block_keys[first:end]:
            self.anywhere.setdefault(key, request)
            self.on_rank.setdefault((request.home_rank, key), request)

    def shared_end(self, request: Request, other: Request) -> int:
        """Tokens of full prompt blocks that both share from position 0."""
        mine, theirs = request.prompt_block_keys, other.prompt_block_keys
        shortest = min(len(mine), len(theirs))
        # keys are chained: equal up to some block, different from there on
        common = bisect_left(range(shortest), True, key=lambda i: mine[i] != theirs[i])
        return common * self._block_size


class Scheduler:
    """Decides; the store gives and takes blocks and leases. Called between steps only."""

    def __init__(self, limits: SchedulerLimits, store: PrefixStore) -> None:
        self._limits = limits
        self._store = store
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In order of arrival."""
        self.retired: list[Request] = []
        """Ended, but their routes are still on their way."""
        self.num_preemptions = 0

    # --- requests come and go

    def has_room(self) -> bool:
        return len(self.waiting) < self._limits.max_num_waiting

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes a request off all sets and gives back its blocks and lease."""
        if request.home_rank is None:
            if request in self.waiting:
                self.waiting.remove(request)
        elif request in self.retired:
            self.retired.remove(request)
        else:
            self.running.remove(request)
        self._give_back(request)

    def retire(self, request: Request) -> None:
        """Takes a finished request off the running set; it keeps its blocks until its routes have arrived."""
        self.running.remove(request)
        self.retired.append(request)

    def _give_back(self, request: Request) -> None:
        if request.home_rank is not None and request.private_blocks:
            self._store.free(request.home_rank, sorted(request.private_blocks))
        request.clear_blocks()
        if request.lease is not None:
            self._store.release(request.lease)
            request.lease = None

    # --- one schedule

    def schedule(self) -> Schedule:
        """Chunks for one step. Mutates the sets, the store's leases and the requests' block tables;
        `num_computed_tokens` moves only when the step commits."""
        budgets = [self._limits.max_num_batched_tokens] * self._limits.num_ranks
        preempted: list[tuple[Rank, Request]] = []
        chunks = self._schedule_running(budgets, preempted)
        admitted: list[Request] = []
        if not preempted or not chunks:  # when all were preempted, the oldest begins again
            self._admit(budgets, chunks, admitted)
        chunks.sort(key=lambda chunk: chunk.request.home_rank or 0)
        return Schedule(chunks, admitted, preempted)

    def _schedule_running(
        self, budgets: list[int], preempted: list[tuple[Rank, Request]]
    ) -> list[ScheduledChunk]:
        chunks: dict[Request, ScheduledChunk] = {}
        for request in list(self.running):
            if request.home_rank is None or request not in self.running:
                continue  # preempted for an older one
            rank = request.home_rank
            num_tokens = min(self._next_chunk_length(request), budgets[rank])
            if num_tokens == 0 or not self._make_room(request, num_tokens, preempted):
                continue
            budgets[rank] -= num_tokens
            chunks[request] = self._chunk(request, num_tokens)
        return list(chunks.values())

    def _next_chunk_length(self, request: Request) -> int:
        """Up to the end of the routed part, or to the last known token: never across the border."""
        routed = request.num_recorded_tokens - request.num_computed_tokens
        return routed if routed > 0 else request.num_uncomputed_tokens

    def _chunk(self, request: Request, num_tokens: int) -> ScheduledChunk:
        first = request.num_computed_tokens
        return ScheduledChunk(request, first, num_tokens, first < request.num_recorded_tokens)

    def _make_room(
        self, request: Request, num_tokens: int, preempted: list[tuple[Rank, Request]]
    ) -> bool:
        """Blocks for the chunk; preempts the youngest of the rank as long as there are too few."""
        assert request.home_rank is not None
        rank = request.home_rank
        while True:
            missing = request.num_missing_blocks(request.num_computed_tokens + num_tokens)
            block_ids = self._store.allocate(rank, missing) if missing else []
            if block_ids is not None:
                request.add_blocks(block_ids, private=True)
                return True
            victim = next(r for r in reversed(self.running) if r.home_rank == rank)
            self._preempt(victim)
            preempted.append((rank, victim))
            if victim is request:
                return False

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._give_back(request)
        request.home_rank = None
        self.num_preemptions += 1
        place = next(
            (i for i, other in enumerate(self.waiting) if other.seq_id > request.seq_id),
            len(self.waiting),
        )
        self.waiting.insert(place, request)

    # --- admission

    def _admit(
        self, budgets: list[int], chunks: list[ScheduledChunk], admitted: list[Request]
    ) -> None:
        places = self._limits.max_num_seqs * self._limits.num_ranks - len(self.running)
        window = list(islice(self.waiting, min(WAITING_WINDOW, 4 * places)))
        in_flight = _InFlight(chain(self.running, self.retired), self._limits.block_size)
        head = next((r for r in window if not r.num_pending_frames), None)
        if head is None or self._is_blocked(head, in_flight):
            return
        admission = _Admission(self._limits, self._store, self.running, in_flight, window)
        for request in window:
            if request.num_pending_frames:
                continue  # its own routes are still on their way; it replays them
            candidate = admission.choose(request)
            while candidate and not candidate.waits and not self._start(request, candidate):
                admission.close(candidate.rank)  # to younger requests too: first come, first served
                candidate = admission.choose(request)
            if candidate is None:
                break  # every rank is full
            if candidate.waits:
                continue
            self._allocate_first_chunk(request, candidate.rank, budgets[candidate.rank])
            admitted.append(request)
            admission.started(request)
            chunk = self._chunk(
                request, min(self._next_chunk_length(request), budgets[candidate.rank])
            )
            if chunk.num_tokens:
                budgets[candidate.rank] -= chunk.num_tokens
                chunks.append(chunk)

    def _is_blocked(self, head: Request, in_flight: "_InFlight") -> bool:
        """No rank with a place has the blocks for the first in line, and it waits for nobody's prefix: then nobody
        starts. Spares the matches of all others, step for step, while a cell is short of blocks."""
        size = self._limits.block_size
        match = self._store.match(head.namespace, head.token_ids)
        num_kv = [min(n, (head.num_tokens - 1) // size * size) // size for n in match.num_kv_tokens]
        keys = head.prompt_block_keys
        for block in {*num_kv, match.num_route_tokens // size}:
            if block < len(keys) and keys[block] in in_flight.anywhere:
                return False
        num_blocks = -(-head.num_tokens // size)
        num_seqs = Counter(request.home_rank for request in self.running)
        return not any(
            num_seqs[rank] < self._limits.max_num_seqs
            and self._store.num_allocatable(rank) >= num_blocks - num_kv[rank]
            for rank in map(Rank, range(self._limits.num_ranks))
        )

    def _start(self, request: Request, candidate: "_Choice") -> bool:
        """Leases the match. False, and nothing taken, when the rank has too few blocks for what is known."""
        rank = candidate.rank
        lease, num_kv = self._lease(request, candidate)
        block_ids = self._store.kv_block_ids(lease, rank, num_kv)
        missing = -(-request.num_tokens // self._limits.block_size) - len(block_ids)
        if self._store.num_allocatable(rank) < missing:
            self._store.release(lease)
            return False
        request.lease = lease
        request.home_rank = rank
        request.add_blocks(block_ids, private=False)
        request.num_computed_tokens = num_kv
        request.num_published_blocks = len(block_ids)
        known = request.num_recorded_tokens
        if known < lease.num_tokens:
            for routes in self._store.routes(lease, known, lease.num_tokens):
                request.route_log.append(routes)
        if not request.was_admitted:
            request.was_admitted = True
            request.cached_tokens = num_kv
            request.replayed_tokens = request.num_recorded_tokens - num_kv
            request.unreplayed_tokens = candidate.num_matched - candidate.num_leased
        self.waiting.remove(request)
        self._insert_running(request)
        return True

    def _lease(self, request: Request, candidate: "_Choice") -> tuple[Lease, int]:
        """The lease and the tokens whose KV is taken with it. A request that has routes of its own takes KV from the
        tree only as far as it was made with the same ones: they may have been evicted and recorded anew."""
        namespace, token_ids = request.namespace, request.token_ids
        lease = self._store.acquire(namespace, token_ids, candidate.num_leased)
        num_own = min(request.num_recorded_tokens, candidate.num_kv_now)
        theirs = self._store.routes(lease, 0, num_own)
        num_same = request.route_log.num_same_parts(theirs)
        if num_same == len(theirs):
            return lease, candidate.num_kv_now
        self._store.release(lease)
        num_kv = num_same * self._limits.block_size
        return self._store.acquire(namespace, token_ids, num_kv), num_kv

    def _allocate_first_chunk(self, request: Request, rank: Rank, budget: int) -> None:
        num_tokens = min(self._next_chunk_length(request), budget)
        missing = request.num_missing_blocks(request.num_computed_tokens + num_tokens)
        block_ids = self._store.allocate(rank, missing) if missing else []
        assert block_ids is not None, "num_allocatable promised more"
        request.add_blocks(block_ids, private=True)

    def _insert_running(self, request: Request) -> None:
        place = bisect_left(self.running, request.seq_id, key=lambda r: r.seq_id)
        self.running.insert(place, request)


@dataclass(frozen=True)
class _Choice:
    """The home rank that a waiting request would take."""

    rank: Rank
    num_kv_now: int
    num_leased: int
    """Prefix whose KV or routes it takes from the store."""
    num_matched: int
    """Prefix whose routes the store has."""
    waits: bool
    """Its next block is being computed by a running request, which advances."""


class _Admission:
    """One pass over the waiting requests: matches, load per rank, who waits for whom."""

    def __init__(
        self,
        limits: SchedulerLimits,
        store: PrefixStore,
        running: list[Request],
        in_flight: _InFlight,
        window: list[Request],
    ) -> None:
        self._limits = limits
        self._store = store
        self._in_flight = in_flight
        self._closed: set[Rank] = set()
        self._load = [0.0] * limits.num_ranks
        self._num_seqs = [0] * limits.num_ranks
        self._has_started = False
        for request in running:
            self.started(request, index=False)
        self._matches = {r: store.match(r.namespace, r.token_ids) for r in window}
        self._sharers = Counter(
            key for r in window if (key := self._last_routed_key(r)) is not None
        )

    def started(self, request: Request, *, index: bool = True) -> None:
        """Counts a running request in; with `index`, what it computes is in flight from now on."""
        assert request.home_rank is not None
        self._load[request.home_rank] += SEQUENCE_COST + request.num_uncomputed_tokens
        self._num_seqs[request.home_rank] += 1
        if index:
            self._has_started = True
            self._in_flight.add(request)

    def close(self, rank: Rank) -> None:
        """Too few blocks there for a request that waits: nobody else starts there in this pass."""
        self._closed.add(rank)

    def _current_match(self, request: Request) -> PrefixMatch:
        """Blocks taken for an earlier request of this pass may have evicted KV that was matched before."""
        if self._has_started:
            self._matches[request] = self._store.match(request.namespace, request.token_ids)
        return self._matches[request]

    def _num_store_routes(self, request: Request) -> int:
        """Tokens that take their routes from the store; a preempted request replays its own and only those."""
        if request.num_recorded_tokens or not self._limits.route_replay:
            return 0
        return self._matches[request].num_route_tokens

    def _last_routed_key(self, request: Request) -> bytes | None:
        num_blocks = self._matches[request].num_route_tokens // self._limits.block_size
        keys = request.prompt_block_keys
        return keys[min(num_blocks, len(keys)) - 1] if num_blocks and keys else None

    def choose(self, request: Request) -> _Choice | None:
        """The cheapest open rank with a free place; None when there is none.

        A rank is charged with a request that waits for its prefix: it will come, and the others must see it.
        """
        match = self._current_match(request)
        ranks = [
            Rank(r)
            for r in range(self._limits.num_ranks)
            if self._num_seqs[r] < self._limits.max_num_seqs and r not in self._closed
        ]
        if not ranks:
            return None
        views = {rank: self._view(request, match, rank) for rank in ranks}
        best = select_home_rank([candidate for candidate, _ in views.values()])
        num_kv_now = views[best.rank][1]
        waits = best.num_kv_tokens > num_kv_now or self._waits(request, match)
        if waits:
            self._load[best.rank] += SEQUENCE_COST + best.num_own
            self._num_seqs[best.rank] += 1
        return _Choice(
            rank=best.rank,
            num_kv_now=num_kv_now,
            num_leased=max(num_kv_now, self._num_store_routes(request)),
            num_matched=match.num_route_tokens,
            waits=waits,
        )

    def _view(self, request: Request, match: PrefixMatch, rank: Rank) -> tuple[RankCandidate, int]:
        size = self._limits.block_size
        num_kv_now = min(match.num_kv_tokens[rank], (request.num_tokens - 1) // size * size)
        num_kv, load = num_kv_now, self._load[rank]
        computing = self._computing(request, rank, num_kv_now)
        if computing is not None:
            shared_end = self._in_flight.shared_end(request, computing)
            num_kv = max(num_kv, min(shared_end, (request.num_tokens - 1) // size * size))
            load -= max(0, num_kv - computing.num_computed_tokens)
        routes_end = max(request.num_recorded_tokens, self._num_store_routes(request))
        routed = max(0, routes_end - num_kv)
        own = request.num_tokens - num_kv - routed
        key = self._last_routed_key(request)
        sharers = max(1, self._sharers[key]) if key is not None else 1
        return RankCandidate(rank, num_kv, routed, sharers, own, load), num_kv_now

    def _computing(self, request: Request, rank: Rank, num_kv_now: int) -> Request | None:
        """The running request of this rank that computes the next full block after the KV match."""
        keys = request.prompt_block_keys
        block = num_kv_now // self._limits.block_size
        return self._in_flight.on_rank.get((rank, keys[block])) if block < len(keys) else None

    def _waits(self, request: Request, match: PrefixMatch) -> bool:
        """Somebody computes the next block that has no routes yet: its routes, at least, can be had soon.

        No reason to wait when they would not be replayed: with replay off, or with routes of its own.
        """
        if request.num_recorded_tokens or not self._limits.route_replay:
            return False
        keys = request.prompt_block_keys
        block = match.num_route_tokens // self._limits.block_size
        return block < len(keys) and keys[block] in self._in_flight.anywhere
