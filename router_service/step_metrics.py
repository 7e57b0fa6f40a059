"""What a committed step and an ended request mean in metrics: the observer that every served engine has. One line per
step tells of requests of an engine before that were taken up in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from cluster.log import logger
from cluster.metrics import Metrics
from cluster.types import DispatchMode, FinishReason
from cluster.worker_messages import StepResult
from router_service.request import Request
from router_service.scheduler import Schedule, ScheduledChunk
from router_service.step_observer import StepTimeline

_LOG = logger("recovery")


@dataclass
class _TakenUp:
    """Requests of an engine before, since the last step that was committed, and their known tokens."""

    num_requests: int = 0
    num_routed_tokens: int = 0
    num_unrouted_tokens: int = 0


class StepMetrics:
    def __init__(self, metrics: Metrics, dispatch: DispatchMode) -> None:
        self._metrics = metrics
        self._dispatch = dispatch
        self._taken_up = _TakenUp()
        for metric in (
            metrics.steps,
            metrics.step_seconds,
            metrics.dispatch_seconds,
            metrics.combine_seconds,
            metrics.exchange_messages,
            metrics.exchange_bytes,
        ):
            metric.labels(dispatch)  # shown before the first step

    def committed(
        self, schedule: Schedule, results: Sequence[StepResult], timeline: StepTimeline
    ) -> None:
        metrics, label = self._metrics, schedule.dispatch_label(self._dispatch)
        timings = [result.timings for result in results]
        metrics.steps.labels(label).inc()
        metrics.step_seconds.labels(label).observe(timeline.total)
        metrics.control_seconds.observe(timeline.control(results))
        metrics.dispatch_seconds.labels(label).observe(max(t.dispatch for t in timings))
        metrics.combine_seconds.labels(label).observe(max(t.combine for t in timings))
        metrics.exchange_messages.labels(label).inc(sum(r.sent.messages for r in results))
        metrics.exchange_bytes.labels(label).inc(sum(r.sent.bytes for r in results))
        metrics.gate_seconds.observe(max(t.gate for t in timings))
        metrics.gate_tokens.inc(sum(result.gate_tokens for result in results))
        rows = [int(result.expert_load.sum()) for result in results]
        if max(rows) > 0:
            metrics.expert_load_balancedness.set(sum(rows) / len(rows) / max(rows))
        self._rank_tokens(schedule, len(results))
        for request in schedule.admitted:
            self._first_admission(request)
        self._tell_taken_up()

    def _tell_taken_up(self) -> None:
        taken, self._taken_up = self._taken_up, _TakenUp()
        if taken.num_requests:
            _LOG.warning(
                "requests of the engine before go on requests=%d routed_tokens=%d unrouted_tokens=%d",
                *(taken.num_requests, taken.num_routed_tokens, taken.num_unrouted_tokens),
            )

    def _rank_tokens(self, schedule: Schedule, num_ranks: int) -> None:
        """Idle ranks too, so that every series is there from the first step on."""
        counts = dict.fromkeys(product(range(num_ranks), ("computed", "cached", "replayed")), 0)
        for chunk in schedule.chunks:
            assert chunk.request.home_rank is not None
            source = "replayed" if chunk.replays else "computed"
            counts[chunk.request.home_rank, source] += chunk.num_tokens
            if chunk.replays:
                self._replayed(chunk)
        for request in schedule.admitted:
            assert request.home_rank is not None
            if request.prompt_sources is not None and not request.counted:
                counts[request.home_rank, "cached"] += request.prompt_sources.cached_tokens
        for (rank, source), num_tokens in counts.items():
            self._metrics.rank_tokens.labels(rank, source).inc(num_tokens)

    def _replayed(self, chunk: ScheduledChunk) -> None:
        way = "planned" if chunk.fragment_ids else "negotiated"
        self._metrics.replayed_tokens.labels(way).inc(chunk.num_tokens)
        if chunk.unplanned_reason:
            self._metrics.replay_fallbacks.labels(chunk.unplanned_reason).inc(chunk.num_tokens)

    def _first_admission(self, request: Request) -> None:
        if request.counted or request.prompt_sources is None:
            return
        request.counted = True
        sources = request.prompt_sources
        cached, replayed = sources.cached_tokens, sources.replayed_tokens
        self._metrics.replay_fallbacks.labels("replay_off").inc(request.unreplayed_tokens)
        tokens = self._metrics.prompt_tokens
        tokens.labels("cached").inc(cached)
        tokens.labels("replayed").inc(replayed)
        tokens.labels("computed").inc(request.num_prompt_tokens - cached - replayed)

    def token(self, request: Request, now: float) -> None:
        self._metrics.generation_tokens.inc()
        if request.last_token_seconds is None:
            self._metrics.time_to_first_token.observe(now - request.arrival_seconds)
        else:
            self._metrics.inter_token_latency.observe(now - request.last_token_seconds)
        request.last_token_seconds = now

    def preempted(self, request: Request) -> None:
        self._metrics.preemptions.inc()

    def admitted(self, request: Request) -> None:
        if not request.is_resumed:
            return
        request.is_resumed = False
        num_routed = min(request.num_recorded_tokens, request.num_tokens)
        num_unrouted = request.num_tokens - num_routed
        self._metrics.recovered_requests.labels("engine").inc()
        self._metrics.recovered_tokens.labels("replayed").inc(num_routed)
        self._metrics.recovered_tokens.labels("computed").inc(num_unrouted)
        self._taken_up.num_requests += 1
        self._taken_up.num_routed_tokens += num_routed
        self._taken_up.num_unrouted_tokens += num_unrouted

    def conflicted(self, request: Request, num_blocks: int) -> None:
        self._metrics.route_conflicts.inc(num_blocks)

    def planned_fragment(self, *, hit: bool) -> None:
        counter = self._metrics.plan_fragment_hits if hit else self._metrics.plan_fragment_misses
        counter.inc()

    def finished(self, request: Request, reason: FinishReason, now: float) -> None:
        self._metrics.requests_finished.labels(reason).inc()
        self._metrics.e2e_request_latency.observe(now - request.arrival_seconds)
