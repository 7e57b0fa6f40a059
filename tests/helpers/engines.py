"""Builders for engine tests: an Engine over a real prefix store and any Workers."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from cluster.messages import Completion, PromptSources, RoutePart, SamplingParams, Submit
from cluster.metrics import Metrics
from cluster.routes import ExpertRoutes, RouteShape
from cluster.scores import SCORE_BYTES, ScoreColumns
from cluster.types import DispatchMode, Namespace
from prefix_store.store import PrefixStore
from router_service.clients import Workers
from router_service.engine import Engine
from router_service.engine_limits import EngineLimits
from router_service.engine_parts import EngineParts
from router_service.features import Features
from router_service.fragment_pool import PlanChannel, PlanCompiler
from router_service.plan_book import PlanBook, PlanLimits
from router_service.plans import NoPlans, Plans
from router_service.scheduler import Scheduler
from router_service.scheduler_limits import SchedulerLimits
from router_service.served_weights import ServedWeights
from router_service.step_metrics import StepMetrics

CLIENT = b"http-test"
SUBMIT_FIELDS = frozenset(Submit.__struct_fields__)


def make_namespace(fingerprint: str, tenant: str | None, cache_salt: str | None) -> Namespace:
    return Namespace(f"{fingerprint}/{tenant}/{cache_salt}")


@dataclass
class Generation:
    """What one client saw."""

    token_ids: list[int] = field(default_factory=list)
    scores: list[ScoreColumns] = field(default_factory=list)
    """Of each of them."""
    prompt_scores: ScoreColumns | None = None
    completion: Completion | None = None
    weight_versions: set[str] = field(default_factory=set)
    """Of those that made the tokens."""
    route_parts: list[RoutePart] = field(default_factory=list)
    prompt_sources: PromptSources | None = None
    num_prompt_tokens: int = 0

    @property
    def routes(self) -> ExpertRoutes:
        """Of everything that was an input: what came beyond it was computed before a stop string was seen."""
        assert self.completion is not None
        ids, weights = [], []
        for part in self.route_parts:
            assert part.start == sum(map(len, ids)), "a part is missing, or told twice"
            assert part.topk_weights is not None
            ids.append(part.topk_ids)
            weights.append(part.topk_weights)
        routes = ExpertRoutes(np.concatenate(ids), np.concatenate(weights))
        return routes.slice(0, self.num_prompt_tokens + self.completion.num_output_tokens - 1)


@dataclass(frozen=True)
class Planning:
    """What an engine needs to replay by plans; without it everything replays negotiated."""

    limits: PlanLimits
    compiler: PlanCompiler
    channel: PlanChannel
    first_fragment_id: int = 0


class EngineHarness:
    """Drives an engine as the service would and collects what clients see."""

    def __init__(
        self,
        workers: Workers,
        route_shape: RouteShape,
        *,
        num_ranks: int = 1,
        block_size: int = 4,
        num_kv_blocks: int = 64,
        vocab_size: int = 2**17,
        budget: int = 16,
        max_num_seqs: int = 16,
        max_num_waiting: int = 1000,
        route_replay: bool = True,
        kv_bytes_per_block: int = 64,
        dispatch: DispatchMode | None = None,
        planned: Planning | None = None,
        route_bytes_per_step: int = 2**20,
        fingerprint: str = "first weights",
    ) -> None:
        self.store = PrefixStore(
            num_ranks=num_ranks,
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            route_shape=route_shape,
            route_budget_bytes=4
            * num_ranks
            * num_kv_blocks
            * block_size
            * route_shape.bytes_per_token,
            score_budget_bytes=num_ranks * num_kv_blocks * block_size * SCORE_BYTES,
            kv_bytes_per_block=kv_bytes_per_block,
        )
        limits = SchedulerLimits(num_ranks, block_size, budget, max_num_seqs, max_num_waiting)
        dispatch = dispatch or ("local" if num_ranks == 1 else "negotiated")
        self.metrics = Metrics(CollectorRegistry())
        observer = StepMetrics(self.metrics, dispatch)
        self.features = Features(route_replay=route_replay, planned_dispatch=planned is not None)
        self.plans: Plans = NoPlans()
        if planned is not None:
            self.plans = PlanBook(
                planned.limits,
                features=self.features,
                compiler=planned.compiler,
                channel=planned.channel,
                observer=observer,
                first_fragment_id=planned.first_fragment_id,
            )
        self.scheduler = Scheduler(limits, self.store, self.features, self.plans)
        self.engine = Engine(
            EngineLimits(
                num_ranks=num_ranks,
                block_size=block_size,
                num_kv_blocks=num_kv_blocks,
                vocab_size=vocab_size,
                route_shape=route_shape,
                dispatch=dispatch,
                placement_epoch=0,
                frame_timeout_seconds=5.0,
                route_bytes_per_step=route_bytes_per_step,
            ),
            EngineParts(
                scheduler=self.scheduler,
                store=self.store,
                workers=workers,
                plans=self.plans,
                features=self.features,
                observer=observer,
            ),
            weights=ServedWeights(fingerprint, make_namespace),
            draw_seed=lambda: 7,
        )
        self.fingerprint = fingerprint
        self.generations: dict[str, Generation] = {}

    def submit(self, request_id: str, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        """Greedy unless told otherwise. fields: of Submit and of SamplingParams, by name."""
        of_submit = {name: fields.pop(name) for name in tuple(fields) if name in SUBMIT_FIELDS}
        of_submit = {"cache_salt": None, "return_routes": True, "return_scores": True} | of_submit
        defaults = {"temperature": 0.0, "top_p": 1.0, "seed": None, "stop_token_ids": ()}
        sampling = SamplingParams(max_tokens, **(defaults | fields))
        self.generations[request_id] = Generation(num_prompt_tokens=len(prompt))
        self.engine.submit(
            CLIENT, Submit(request_id, np.array(prompt, np.int32), sampling, **of_submit)
        )

    def step(self) -> None:
        self.engine.step()
        self.collect()

    def collect(self) -> None:
        for item in self.engine.take_deltas():
            generation = self.generations[item.delta.request_id]
            assert generation.completion is None, "a delta after the completion"
            generation.token_ids += item.delta.token_ids
            if item.delta.token_ids:
                generation.weight_versions.add(item.delta.weight_version)
            if item.delta.routes is not None:
                generation.route_parts.append(item.delta.routes)
            if item.delta.prompt_sources is not None:
                assert generation.prompt_sources is None, "told twice"
                generation.prompt_sources = item.delta.prompt_sources
            if item.delta.prompt_scores is not None:
                assert generation.prompt_scores is None, "told twice"
                generation.prompt_scores = item.delta.prompt_scores
            if item.delta.scores is not None:
                generation.scores += item.delta.scores.split()
            generation.completion = item.delta.completion

    def run(self, *, max_steps: int = 20_000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, f"not done after {max_steps} steps"
        self.engine.check_invariants()

    def generate(self, request_id: str, prompt: list[int], max_tokens: int) -> Generation:
        self.submit(request_id, prompt, max_tokens)
        self.run()
        return self.generations[request_id]
