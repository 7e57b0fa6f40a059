"""Which waiting request starts where, and which waits for a prefix that somebody computes. Changes no request."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from cluster.prefix_match import PrefixMatch
from cluster.types import Rank
from router_service.features import Features
from router_service.in_flight import InFlight
from router_service.rank_selection import SEQUENCE_COST, RankCandidate, select_home_rank
from router_service.request import Request
from router_service.scheduler_limits import SchedulerLimits


@dataclass(frozen=True)
class HomeChoice:
    """The home rank that a waiting request would take."""

    rank: Rank
    num_kv_now: int
    num_leased: int
    """Prefix whose KV or routes it takes from the store."""
    num_matched: int
    """Prefix whose routes the store has."""
    waits: bool
    """Its next block, or scores that it asks for, are being computed by a running request, which advances."""


class Admission:
    """One pass over the waiting requests: matches, load per rank, who waits for whom."""

    def __init__(
        self,
        limits: SchedulerLimits,
        features: Features,
        match: Callable[[Request], PrefixMatch],
        running: list[Request],
        in_flight: InFlight,
        window: list[Request],
    ) -> None:
        self._limits = limits
        self._features = features
        self._match = match
        self._in_flight = in_flight
        self._closed: set[Rank] = set()
        self._load = [0.0] * limits.num_ranks
        self._num_seqs = [0] * limits.num_ranks
        self._has_started = False
        for request in running:
            self.started(request, index=False)
        self._matches = {r: match(r) for r in window}
        self._sharers = Counter(
            key for r in window if (key := self._last_routed_key(r)) is not None
        )

    def started(self, request: Request, *, index: bool = True) -> None:
        """Counts a running request in; with `index`, what it computes is in flight from now on, if it will be
        offered to the store."""
        assert request.home_rank is not None
        self._load[request.home_rank] += SEQUENCE_COST + request.num_uncomputed_tokens
        self._num_seqs[request.home_rank] += 1
        if index:
            self._has_started = True
            if self._features.prefix_store:
                self._in_flight.add(request)

    def close(self, rank: Rank) -> None:
        """Too few blocks there for a request that waits: nobody else starts there in this pass."""
        self._closed.add(rank)

    def _current_match(self, request: Request) -> PrefixMatch:
        """Blocks taken for an earlier request of this pass may have evicted KV that was matched before."""
        if self._has_started:
            self._matches[request] = self._match(request)
        return self._matches[request]

    def _num_store_routes(self, request: Request) -> int:
        """Tokens that take their routes from the store; a preempted request replays its own and only those."""
        if request.num_recorded_tokens or not self._features.route_replay:
            return 0
        return self._matches[request].num_route_tokens

    def _last_routed_key(self, request: Request) -> bytes | None:
        num_blocks = self._matches[request].num_route_tokens // self._limits.block_size
        keys = request.prompt_block_keys
        return keys[min(num_blocks, len(keys)) - 1] if num_blocks and keys else None

    def choose(self, request: Request) -> HomeChoice | None:
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
        waits = (
            best.num_kv_tokens > num_kv_now
            or self._waits(request, match)
            or self._awaits_scores(request)
        )
        if waits:
            self._load[best.rank] += SEQUENCE_COST + best.num_own
            self._num_seqs[best.rank] += 1
        return HomeChoice(
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
        again = num_kv - min(num_kv, request.first_needed_token)
        key = self._last_routed_key(request)
        sharers = max(1, self._sharers[key]) if key is not None else 1
        replays_again = routes_end >= num_kv  # else by the gate, as what no rank has
        candidate = RankCandidate(
            rank,
            num_kv,
            routed,
            sharers,
            num_own=own + again * (not replays_again),
            load=load,
            num_own_replay=again * replays_again,
        )
        return candidate, num_kv_now

    def _computing(self, request: Request, rank: Rank, num_kv_now: int) -> Request | None:
        """The running request of this rank that computes the next full block after the KV match."""
        keys = request.prompt_block_keys
        block = num_kv_now // self._limits.block_size
        if block >= len(keys):
            return None
        computing = self._in_flight.on_rank.get((rank, keys[block]))
        return computing if computing is not None and _comes_in_time(computing, request) else None

    def _waits(self, request: Request, match: PrefixMatch) -> bool:
        """Somebody computes the next block that has no routes yet: its routes, at least, can be had soon.

        No reason to wait when they would not be replayed: with replay off, or with routes of its own.
        """
        if request.num_recorded_tokens or not self._features.route_replay:
            return False
        keys = request.prompt_block_keys
        block = match.num_route_tokens // self._limits.block_size
        if block >= len(keys):
            return False
        computing = self._in_flight.anywhere.get(keys[block])
        return computing is not None and _comes_in_time(computing, request)

    def _awaits_scores(self, request: Request) -> bool:
        """Somebody computes scores that it asks for and would else compute beside it. What a preempted one has of its
        own is not looked at: it goes on."""
        if not request.score_log.scores_prompt or request.was_admitted:
            return False
        scoring = self._in_flight.scoring(request)
        return scoring is not None and _comes_in_time(scoring, request)


def _comes_in_time(computing: Request, request: Request) -> bool:
    """It makes progress whatever comes: of a later priority it might get no tokens as long as others like `request`
    come."""
    return computing.finish_reason is not None or computing.priority <= request.priority
