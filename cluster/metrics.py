"""Every metric, declared once with help and unit. The engine owns them all, so that a cell is counted once;
HTTP servers fetch the rendered text. The registry is passed in.

Labels have few values, none of them comes from a user.
"""

from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from cluster.gatekeeper import REFUSALS
from cluster.prefix_match import StateOnDisk
from cluster.types import StorePart

FALLBACK_REASONS = (
    *("replay_off", "planned_off", "too_short", "plan_not_ready", "plan_memory", "plan_failed"),
    *("step_budget", "no_border"),
)
_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_RECOVERY_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """The metrics of one cell."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a `_created` series beside each counter helps nobody here
        self._registry = registry
        self._state_seen = StateOnDisk.nothing()
        self._evictions_seen = dict.fromkeys(get_args(StorePart), 0)
        self._declare_requests()
        self._declare_steps()
        self._declare_store()
        self._declare_state()
        self.weight_updates = self._counter(
            "weight_updates_total", "Commands to serve other weights, by outcome", ("outcome",)
        )
        for outcome in ("updated", "refused"):
            self.weight_updates.labels(outcome)
        self.channel_refusals = self._counter(
            "channel_refusals_total",
            "Connections to the engine's channels that were turned away: key is none of the cell's, or no handshake",
            ("reason",),
        )
        for reason in REFUSALS:
            self.channel_refusals.labels(reason)
        self.recovery_seconds = self._histogram(
            "recovery_seconds",
            "From a group of ranks that broke, or an engine that was lost, to the next step",
            _RECOVERY_BUCKETS,
        )
        self.recovered_requests = self._counter(
            "recovered_requests_total",
            "Requests that went on after what they had lost: the rank that had their KV, or the engine",
            ("lost",),
        )
        for lost in ("rank", "engine"):
            self.recovered_requests.labels(lost)
        self.recovered_tokens = self._counter(
            "recovered_tokens_total",
            "Known tokens of requests of lost ranks or engines: with routes (replayed, or in KV elsewhere), or to be "
            "computed",
            ("source",),
        )
        for source in ("computed", "replayed"):
            self.recovered_tokens.labels(source)

    def _counter(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"pointsman_{name}", help_text, labels, registry=self._registry)

    def _gauge(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"pointsman_{name}", help_text, labels, registry=self._registry)

    def _histogram(
        self, name: str, help_text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        return Histogram(
            f"pointsman_{name}", help_text, labels, buckets=buckets, registry=self._registry
        )

    def _declare_requests(self) -> None:
        self.requests_running = self._gauge("requests_running", "Requests with a home rank")
        self.requests_waiting = self._gauge("requests_waiting", "Requests that wait for admission")
        self.requests_finished = self._counter(
            "requests_finished_total", "Requests that ended, by reason", ("reason",)
        )
        for reason in ("stop", "length", "abort", "error"):
            self.requests_finished.labels(reason)
        self.preemptions = self._counter("preemptions_total", "Requests put back to waiting")
        self.prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens by where they came from", ("source",)
        )
        for source in ("computed", "cached", "replayed"):
            self.prompt_tokens.labels(source)
        self.rank_tokens = self._counter(
            "rank_tokens_total",
            "Tokens by home rank: computed with the gate, replayed, or (prompt only) found in its KV",
            ("rank", "source"),
        )
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens sampled")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From submit to the first token", _LATENCY_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between tokens of one request", _LATENCY_BUCKETS
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From submit to completion", _LATENCY_BUCKETS
        )

    def _declare_steps(self) -> None:
        labels = ("dispatch",)
        self.step_seconds = self._histogram(
            "step_seconds", "Schedule to update of one step", _STEP_BUCKETS, labels
        )
        self.control_seconds = self._histogram(
            "control_seconds", "Part of a step outside the slowest rank's forward", _STEP_BUCKETS
        )
        self.steps = self._counter("steps_total", "Committed steps", labels)
        self.dispatch_seconds = self._histogram(
            "dispatch_seconds", "Dispatch of one step, slowest rank", _STEP_BUCKETS, labels
        )
        self.combine_seconds = self._histogram(
            "combine_seconds", "Combine of one step, slowest rank", _STEP_BUCKETS, labels
        )
        self.exchange_messages = self._counter(
            "exchange_messages_total",
            "Messages from rank to rank; an all-to-all sends one to every other rank, a plan one per pair of ranks "
            "with rows, or an all-to-all in layers where from 8 ranks on at least 90 % of the pairs have rows",
            labels,
        )
        self.exchange_bytes = self._counter(
            "exchange_bytes_total", "Payload bytes of the messages from rank to rank", labels
        )
        self.gate_seconds = self._histogram(
            "gate_seconds", "Gates of one step, slowest rank", _STEP_BUCKETS
        )
        self.gate_tokens = self._counter(
            "gate_tokens_total", "Tokens that went through the gates (replayed ones do not)"
        )
        self.replay_fallbacks = self._counter(
            "replay_fallbacks_total",
            "Tokens with recorded routes that were not replayed (replay_off) or not by a plan (others)",
            ("reason",),
        )
        for reason in FALLBACK_REASONS:
            self.replay_fallbacks.labels(reason)
        self.replayed_tokens = self._counter(
            "replayed_tokens_total", "Tokens computed with recorded routes", ("dispatch",)
        )
        for dispatch in ("negotiated", "planned"):
            self.replayed_tokens.labels(dispatch)
        self.plan_fragment_hits = self._counter(
            "plan_fragment_hits_total", "Runs of tokens to replay whose plan fragment was known"
        )
        self.plan_fragment_misses = self._counter(
            "plan_fragment_misses_total", "Plan fragments that had to be compiled"
        )
        self.plan_fragments = self._gauge(
            "plan_fragments", "Plan fragments that are made, or to be"
        )
        self.plan_fragment_bytes = self._gauge(
            "plan_fragment_bytes", "Bytes of plan fragments that a rank holds, at most"
        )
        self.expert_load_balancedness = self._gauge(
            "expert_load_balancedness", "Mean over maximum expert rows of the ranks, last step"
        )

    def _declare_store(self) -> None:
        self.route_conflicts = self._counter(
            "route_conflicts_total", "Blocks kept private because other experts are recorded"
        )
        self.prefix_store_bytes = self._gauge(
            "prefix_store_bytes", "Bytes in the prefix store", ("part",)
        )
        self.prefix_store_nodes = self._gauge("prefix_store_nodes", "Nodes of the prefix store")
        self.prefix_store_evictions = self._counter(
            "prefix_store_evictions_total", "Blocks whose part was evicted", ("part",)
        )
        for part in get_args(StorePart):
            self.prefix_store_bytes.labels(part)
            self.prefix_store_evictions.labels(part)
        self.kv_blocks_free = self._gauge("kv_blocks_free", "Free KV blocks", ("rank",))
        self.kv_blocks_used = self._gauge(
            "kv_blocks_used", "KV blocks held by requests or the store", ("rank",)
        )

    def _declare_state(self) -> None:
        self.state_bytes = self._gauge("state_bytes", "Bytes of all files in the state directory")
        self.state_waiting_bytes = self._gauge(
            "state_waiting_bytes", "Bytes of what was published and is not written yet"
        )
        self.state_failing = self._gauge(
            "state_failing",
            "1 while something is not on disk that should be, because the disk failed",
        )
        self.state_blocks_loaded = self._gauge(
            "state_blocks_loaded", "Blocks whose routes were found on disk at the start"
        )
        self.state_snapshots = self._counter("state_snapshots_total", "Snapshots completed")
        self.state_runs_dropped = self._counter(
            "state_runs_dropped_total",
            "Published runs of blocks that were not written when they came; the next snapshot has what is still stored",
        )

    def set_state(self, state: StateOnDisk | None) -> None:
        """Brings what is shown of the state directory up to date."""
        if state is None:
            return
        self.state_bytes.set(state.num_bytes)
        self.state_waiting_bytes.set(state.waiting_bytes)
        self.state_failing.set(1 if state.error else 0)
        self.state_blocks_loaded.set(state.blocks_loaded)
        self.state_snapshots.inc(state.snapshots - self._state_seen.snapshots)
        self.state_runs_dropped.inc(state.runs_dropped - self._state_seen.runs_dropped)
        self._state_seen = state

    def set_evictions(self, totals: dict[StorePart, int]) -> None:
        """Brings the eviction counters up to totals that the store keeps."""
        for part, total in totals.items():
            counter = self.prefix_store_evictions.labels(part)
            counter.inc(total - self._evictions_seen[part])
            self._evictions_seen[part] = total

    def render(self) -> bytes:
        """The page in the Prometheus text format."""
        return generate_latest(self._registry)
