"""Which tokens of which requests the next step computes. Owner of the waiting and running requests.

No prefill or decode phase: every running request has tokens known and tokens computed, and each step closes part of the
gap under a token budget per rank (vLLM v1). By priority, and first come, first served among equals: that is the order
of the queue and of who gets tokens first, and the last in it is preempted when blocks run out. Nobody is preempted for
somebody who waits.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain, islice

from cluster.messages import PromptSources
from cluster.prefix_match import Lease, PrefixMatch
from cluster.types import DispatchMode, Rank
from router_service.admission import Admission, HomeChoice
from router_service.clients import PrefixStore
from router_service.features import Features
from router_service.in_flight import InFlight
from router_service.plans import PlannedRun, Plans
from router_service.request import Request
from router_service.scheduler_limits import SchedulerLimits

WAITING_WINDOW = 256
"""Waiting requests that one schedule looks at, from the first in line."""


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens [first_position, first_position + num_tokens) of a request in one step, all replayed or none.

    num_suppressed: the first of them, whose KV is there already: their pass reads it and writes none
    num_scored: the first of them, after which the next token's score is asked
    """

    request: Request
    first_position: int
    num_tokens: int
    replays: bool
    num_suppressed: int
    num_scored: int
    fragment_ids: tuple[int, ...] = ()
    """Plan fragments that cover the tokens; none: it is dispatched without a plan."""
    unplanned_reason: str = ""
    """Why a chunk that replays has no plan."""

    @staticmethod
    def next_of(
        request: Request,
        num_tokens: int,
        *,
        replays: bool,
        fragment_ids: tuple[int, ...] = (),
        unplanned_reason: str = "",
    ) -> "ScheduledChunk":
        """The next `num_tokens` tokens to compute."""
        first = request.num_computed_tokens
        num_suppressed = min(num_tokens, max(0, request.num_reused_tokens - first))
        return ScheduledChunk(
            request,
            first,
            num_tokens,
            replays,
            num_suppressed,
            request.score_log.num_to_score(first, first + num_tokens),
            fragment_ids,
            unplanned_reason,
        )

    @property
    def records(self) -> bool:
        """The gate's choices for it become the request's routes."""
        return not self.replays and not self.num_suppressed

    @property
    def samples(self) -> bool:
        end = self.first_position + self.num_tokens
        return end == self.request.num_tokens and self.request.generates


@dataclass(frozen=True)
class Schedule:
    """chunks by home rank; admitted requests need their sampling parameters sent before the step."""

    chunks: list[ScheduledChunk]
    admitted: list[Request]
    preempted: list[tuple[Rank, Request]]
    awaits_plans: bool
    """Some request was left out because its plan is about to arrive."""

    def dispatch_label(self, unplanned: DispatchMode) -> str:
        """How the step's tokens travel: all planned, none, or both ways."""
        num_planned = sum(bool(chunk.fragment_ids) for chunk in self.chunks)
        if not num_planned:
            return unplanned
        return "planned" if num_planned == len(self.chunks) else "mixed"


@dataclass
class _RankBudget:
    """Of one rank in one step."""

    num_tokens: int
    has_long_chunk: bool = False
    """Of more than a decode's one token: part of work that ends."""

    def spend(self, num_tokens: int) -> None:
        self.num_tokens -= num_tokens
        self.has_long_chunk |= num_tokens > 1


class Scheduler:
    """Decides; the store gives and takes blocks and leases. Called between steps only."""

    def __init__(
        self, limits: SchedulerLimits, store: PrefixStore, features: Features, plans: Plans
    ) -> None:
        self._limits = limits
        self._store = store
        self._features = features
        self._plans = plans
        self._awaits_plans = False
        self._waits_for_grammars = False
        """Nothing else can be computed."""
        self._alone: Request | None = None
        """See `schedule`."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In order of precedence, and so is `waiting`."""
        self.retired: list[Request] = []
        """Ended, but their routes are still on their way."""
        self.num_preemptions = 0

    # --- requests come and go

    @property
    def max_num_waiting(self) -> int:
        return self._limits.max_num_waiting

    def add(self, request: Request) -> None:
        if self.waiting and request.precedence < self.waiting[-1].precedence:
            place = bisect_left(self.waiting, request.precedence, key=lambda r: r.precedence)
            self.waiting.insert(place, request)
        else:
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

    def displace(self, request: Request) -> None:
        """Takes a request off its rank, for good if it has ended, else back to the queue."""
        holders = self.retired if request in self.retired else self.running
        holders.remove(request)
        self._give_back(request)
        request.home_rank = None
        if request.finish_reason is None:
            self.add(request)

    def _give_back(self, request: Request) -> None:
        self._plans.release(request)
        if request.home_rank is not None and request.private_blocks:
            self._store.free(request.home_rank, sorted(request.private_blocks))
        request.clear_blocks()
        if request.lease is not None:
            self._store.release(request.lease)
            request.lease = None

    def note_compiling(self, compiling: Collection[int]) -> None:
        """Seq_ids, as of a step before which all that run were announced: who is not named has its grammar by now."""
        for request in self.running:
            request.awaits_grammar &= request.seq_id in compiling

    # --- one schedule

    def schedule(self, alone: Request | None = None) -> Schedule:
        """Chunks for one step, of nobody but `alone` if that is given. Mutates the sets, the store's leases and the
        requests' block tables; `num_computed_tokens` moves only when the step commits."""
        limits = self._limits
        self._alone = alone
        budgets = [_RankBudget(limits.max_num_batched_tokens) for _ in range(limits.num_ranks)]
        preempted: list[tuple[Rank, Request]] = []
        self._awaits_plans = False
        chunks = self._schedule_running(budgets, preempted)
        admitted: list[Request] = []
        if not preempted or not chunks:  # when all were preempted, the first begins again
            self._admit(budgets, chunks, admitted)
        if not chunks and not admitted and not self._awaits_plans:
            self._waits_for_grammars = True
            chunks = self._schedule_running(budgets, preempted)
            self._waits_for_grammars = False
        chunks.sort(key=lambda chunk: chunk.request.home_rank or 0)
        return Schedule(chunks, admitted, preempted, self._awaits_plans)

    def _may_run(self, request: Request) -> bool:
        return self._alone is None or request is self._alone

    def _schedule_running(
        self, budgets: list[_RankBudget], preempted: list[tuple[Rank, Request]]
    ) -> list[ScheduledChunk]:
        chunks: dict[Request, ScheduledChunk] = {}
        for request in list(self.running):
            if request.home_rank is None or request not in self.running:
                continue  # preempted for one before it
            if not self._may_run(request):
                continue
            rank = request.home_rank
            chunk = self._next_chunk(request, budgets[rank])
            if chunk is None or not self._make_room(request, chunk.num_tokens, preempted):
                continue
            budgets[rank].spend(chunk.num_tokens)
            chunks[request] = chunk
        return list(chunks.values())

    def _next_chunk(self, request: Request, budget: _RankBudget) -> ScheduledChunk | None:
        """Up to the end of the routed part, or to the last known token: never across the border. None when the budget
        is spent or the request waits for its grammar, its plan or room for it."""
        if not request.num_uncomputed_tokens or self._lets_others_go_on(request):
            return None
        first = request.num_computed_tokens
        routed = max(0, request.num_recorded_tokens - first)
        if not request.replays_next:
            self._plans.release(request)
            num_tokens = min(routed or request.num_uncomputed_tokens, budget.num_tokens)
            if not num_tokens:
                return None
            return ScheduledChunk.next_of(request, num_tokens, replays=False)
        limit = min(routed, budget.num_tokens)
        return self._replay_chunk(request, limit, budget) if limit else None

    def _lets_others_go_on(self, request: Request) -> bool:
        """Its grammar is being compiled beside the steps: where others run it does not make them wait for that. Alone
        it may wait in the step."""
        if not request.awaits_grammar or self._waits_for_grammars:
            return False
        return any(r.num_uncomputed_tokens and not r.awaits_grammar for r in self.running)

    def _replay_chunk(
        self, request: Request, limit: int, budget: _RankBudget
    ) -> ScheduledChunk | None:
        run = self._plans.cover(request, limit)
        if isinstance(run, PlannedRun):
            return ScheduledChunk.next_of(
                request, run.num_tokens, replays=True, fragment_ids=run.fragment_ids
            )
        if run.wait:
            self._awaits_plans = True
            return None
        if run.fits_later and budget.has_long_chunk:
            return (
                None  # others took the room in this step, and they end: borders are worth the wait
            )
        num_tokens = min(limit, run.max_num_tokens or limit)
        return ScheduledChunk.next_of(
            request, num_tokens, replays=True, unplanned_reason=run.reason
        )

    def _make_room(
        self, request: Request, num_tokens: int, preempted: list[tuple[Rank, Request]]
    ) -> bool:
        """Blocks for the chunk; preempts the last of the rank as long as there are too few."""
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
        self.displace(request)
        self.num_preemptions += 1

    # --- admission

    def _admit(
        self, budgets: list[_RankBudget], chunks: list[ScheduledChunk], admitted: list[Request]
    ) -> None:
        places = self._limits.max_num_seqs * self._limits.num_ranks - len(self.running)
        window = list(islice(self.waiting, min(WAITING_WINDOW, 4 * places)))
        window = [request for request in window if self._may_run(request)]
        head = next((r for r in window if _is_ready(r)), None)
        if head is None:
            return
        offering = chain(self.running, self.retired) if self._features.prefix_store else ()
        in_flight = InFlight(offering, self._limits.block_size)
        if self._is_blocked(head, in_flight):
            return
        admission = Admission(
            self._limits, self._features, self._match, self.running, in_flight, window
        )
        for request in window:
            if not _is_ready(request):
                continue
            request.take_from_leader()
            candidate = admission.choose(request)
            while candidate and not candidate.waits and not self._start(request, candidate):
                admission.close(candidate.rank)  # to later requests too: nobody overtakes
                candidate = admission.choose(request)
            if candidate is None:
                break  # every rank is full
            if candidate.waits:
                continue
            admitted.append(request)
            admission.started(request)
            if request.replays_next:
                self._plans.want(request)
            chunk = self._next_chunk(request, budgets[candidate.rank])
            if chunk is not None:
                self._allocate_first_chunk(request, chunk.num_tokens)
                budgets[candidate.rank].spend(chunk.num_tokens)
                chunks.append(chunk)

    def _match(self, request: Request) -> PrefixMatch:
        if self._features.prefix_store:
            return self._store.match(request.namespace, request.token_ids)
        return PrefixMatch(request.namespace, 0, (0,) * self._limits.num_ranks)

    def _is_blocked(self, head: Request, in_flight: InFlight) -> bool:
        """No rank with a place has the blocks for the first in line, and it waits for nobody's prefix: then nobody
        starts. Spares the matches of all others, step for step, while a cell is short of blocks."""
        size = self._limits.block_size
        match = self._match(head)
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

    def _start(self, request: Request, candidate: HomeChoice) -> bool:
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
        request.awaits_grammar = request.sampling.rules.grammar is not None
        request.add_blocks(block_ids, private=False)
        log, stored = request.score_log, None
        if log.scores_prompt or request.was_admitted:
            stored = self._store.scores(lease, 0, lease.num_tokens, log.num_listed)
        log.begin(lease.num_tokens, stored)
        request.num_reused_tokens = num_kv
        request.num_computed_tokens = min(num_kv, request.first_needed_token)
        request.num_published_blocks = len(block_ids)
        known = request.num_recorded_tokens
        request.replays_reused = self._features.route_replay or known > 0
        if known < lease.num_tokens:
            request.route_log.append(self._store.routes(lease, known, lease.num_tokens))
        request.was_admitted = True
        self._count_sources(request, candidate)
        self.waiting.remove(request)
        self._insert_running(request)
        return True

    def _count_sources(self, request: Request, candidate: HomeChoice) -> None:
        """Where its prompt comes from, once, at the first admission."""
        if request.prompt_sources is not None:
            return
        num_prompt, num_replayed = request.num_prompt_tokens, 0
        if not request.num_uncomputed_tokens:
            request.prompt_sources = PromptSources(num_prompt, 0)
            return
        num_cached = min(request.num_computed_tokens, num_prompt)
        if request.replays_next or request.num_computed_tokens == request.num_reused_tokens:
            num_replayed = min(request.num_recorded_tokens, num_prompt) - num_cached
        request.prompt_sources = PromptSources(num_cached, num_replayed)
        num_matched = min(candidate.num_matched, num_prompt)
        request.unreplayed_tokens = num_matched - min(candidate.num_leased, num_prompt)

    def _lease(self, request: Request, candidate: HomeChoice) -> tuple[Lease, int]:
        """The lease and the tokens whose KV is taken with it. A request that has routes of its own takes KV from the
        tree only as far as it was made with the same ones: they may have been evicted and recorded anew."""
        namespace, token_ids = request.namespace, request.token_ids
        lease = self._store.acquire(namespace, token_ids, candidate.num_leased)
        num_own = min(request.num_recorded_tokens, candidate.num_kv_now)
        theirs = self._store.routes(lease, 0, num_own)
        num_same = request.route_log.num_same_tokens(theirs)
        if num_same == num_own:
            return lease, candidate.num_kv_now
        self._store.release(lease)
        num_kv = num_same - num_same % self._limits.block_size
        return self._store.acquire(namespace, token_ids, num_kv), num_kv

    def _allocate_first_chunk(self, request: Request, num_tokens: int) -> None:
        assert request.home_rank is not None
        missing = request.num_missing_blocks(request.num_computed_tokens + num_tokens)
        block_ids = self._store.allocate(request.home_rank, missing) if missing else []
        assert block_ids is not None, "num_allocatable promised more"
        request.add_blocks(block_ids, private=True)

    def _insert_running(self, request: Request) -> None:
        place = bisect_left(self.running, request.precedence, key=lambda r: r.precedence)
        self.running.insert(place, request)


def _is_ready(request: Request) -> bool:
    """The routes that it shall replay, its own or its leader's, are not on their way any more."""
    return not request.num_pending_frames and not request.awaits_leader
