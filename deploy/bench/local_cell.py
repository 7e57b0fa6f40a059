"""A cell for measurements: rank processes without Ray, engine and store here, so that steps can be watched."""

import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.channel import PullSocket, RouterSocket
from cluster.channel_keys import CellKeys, PeerKeys
from cluster.config import Config
from cluster.errors import CellError
from cluster.gatekeeper import Gatekeeper
from cluster.messages import Completion, SamplingParams, Submit
from cluster.namespace import model_fingerprint
from cluster.rank_place import RankPlace
from cluster.types import FinishReason
from cluster.worker_messages import StepResult
from deploy.cell_plan import CellPlan
from deploy.engine_side import make_store, served_shapes, start_compiler
from expert_workers.device import cpu_device, use_one_compute_thread
from expert_workers.ep_group import host_store
from expert_workers.worker_builder import WorkerOptions, build_expert_worker
from expert_workers.worker_loop import run_worker
from prefix_store.compiler_thread import CompilerThread
from router_service.engine_composition import Surroundings, compose_engine
from router_service.request import Request
from router_service.scheduler import Schedule
from router_service.step_clock import StepClock
from router_service.step_observer import StepTimeline
from router_service.worker_client import WorkerClient

LOOPBACK = "127.0.0.1"
START_SECONDS = 120.0
_CLIENT = b"bench"


@dataclass(frozen=True)
class WatchedStep:
    """num_planned_tokens of the num_replayed_tokens travelled by plans; home_ranks have a chunk."""

    num_tokens: int
    num_chunks: int
    num_replayed_tokens: int
    num_planned_tokens: int
    home_ranks: frozenset[int]
    timeline: StepTimeline
    results: Sequence[StepResult]


@dataclass(frozen=True)
class Generation:
    """One request that had the cell to itself.

    token_seconds: since the submit, when each token was there
    prefill:       the steps up to the one that sampled the first token
    """

    token_ids: list[int]
    token_seconds: list[float]
    prefill: Sequence[WatchedStep]
    completion: Completion
    num_compiled_fragments: int


@dataclass
class RecordingObserver:
    """Keeps every step and counts plan fragments to be compiled; the other events are not needed here."""

    steps: list[WatchedStep] = field(default_factory=list)
    num_compiled_fragments: int = 0

    def clear(self) -> None:
        self.steps.clear()
        self.num_compiled_fragments = 0

    def committed(
        self, schedule: Schedule, results: Sequence[StepResult], timeline: StepTimeline
    ) -> None:
        chunks = schedule.chunks
        step = WatchedStep(
            num_tokens=sum(chunk.num_tokens for chunk in chunks),
            num_chunks=len(chunks),
            num_replayed_tokens=sum(chunk.num_tokens for chunk in chunks if chunk.replays),
            num_planned_tokens=sum(chunk.num_tokens for chunk in chunks if chunk.fragment_ids),
            home_ranks=frozenset(int(chunk.request.home_rank or 0) for chunk in chunks),
            timeline=timeline,
            results=results,
        )
        self.steps.append(step)

    def token(self, request: Request, now: float) -> None: ...

    def preempted(self, request: Request) -> None: ...

    def admitted(self, request: Request) -> None: ...

    def planned_fragment(self, *, hit: bool) -> None:
        self.num_compiled_fragments += not hit

    def conflicted(self, request: Request, num_blocks: int) -> None: ...

    def finished(self, request: Request, reason: FinishReason, now: float) -> None: ...


class LocalCell:
    """Submit, run, look at `observer`."""

    def __init__(
        self,
        config: Config,
        plan: CellPlan,
        workers: WorkerClient,
        compiler: CompilerThread,
        fingerprint: str,
    ) -> None:
        self.observer = RecordingObserver()
        self.plan = plan
        around = Surroundings(
            store=make_store(plan),
            compiler=compiler,
            workers=workers,
            observer=self.observer,
            draw_seed=lambda: 0,
        )
        shapes = served_shapes(plan)
        self.engine = compose_engine(config, plan.identity(fingerprint), shapes, around)

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        cache_salt: str | None = None,
        *,
        recompute_prompt: bool = False,
    ) -> None:
        """Greedy, to the last token."""
        sampling = SamplingParams(max_tokens, 0.0, 1.0, None, ())
        submit = Submit(
            request_id,
            np.array(prompt, np.int32),
            sampling,
            cache_salt,
            False,
            recompute_prompt=recompute_prompt,
        )
        self.engine.submit(_CLIENT, submit)

    def run(self) -> dict[str, Completion]:
        """Until all is done."""
        done: dict[str, Completion] = {}
        while self.engine.has_work:
            self.engine.step()
            for item in self.engine.take_deltas():
                if item.delta.completion is not None:
                    done[item.delta.request_id] = item.delta.completion
        return done

    def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        cache_salt: str,
        *,
        recompute_prompt: bool = False,
    ) -> Generation:
        """Alone in the cell, until it is done. Raises CellError if it fails."""
        self.observer.clear()
        started = time.monotonic()
        self.submit(request_id, prompt, max_tokens, cache_salt, recompute_prompt=recompute_prompt)
        token_ids: list[int] = []
        token_seconds: list[float] = []
        num_prefill_steps = 0
        completion: Completion | None = None
        while self.engine.has_work:
            self.engine.step()
            for item in self.engine.take_deltas():
                completion = item.delta.completion
                if item.delta.token_ids:
                    num_prefill_steps = num_prefill_steps or len(self.observer.steps)
                    token_ids += item.delta.token_ids
                    token_seconds.append(time.monotonic() - started)
        assert completion is not None, "the engine is idle, so the request has ended"
        if completion.error is not None:
            raise CellError(completion.error)
        return Generation(
            token_ids=token_ids,
            token_seconds=token_seconds,
            prefill=self.observer.steps[:num_prefill_steps],
            completion=completion,
            num_compiled_fragments=self.observer.num_compiled_fragments,
        )


@contextmanager
def local_cell(config: Config, plan: CellPlan) -> Iterator[LocalCell]:
    """CPU ranks only; each is a fresh process with one compute thread."""
    fingerprint = model_fingerprint(plan.model_dir, plan.dtype)
    store, keys = host_store(LOOPBACK, 0, START_SECONDS), CellKeys.make()
    with (
        Gatekeeper() as gatekeeper,
        RouterSocket() as clients,
        RouterSocket(gatekeeper.door("workers", keys.engine.workers)) as workers,
        PullSocket(gatekeeper.door("routes", keys.engine.workers)) as routes,
    ):
        clients.bind(LOOPBACK)
        endpoints = workers.bind(LOOPBACK), routes.bind(LOOPBACK)
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(
                target=_run_rank,
                args=(plan, rank, store.port, *endpoints, keys.worker),
                daemon=True,
            )
            for rank in range(plan.ep_size)
        ]
        for process in processes:
            process.start()
        client = WorkerClient(
            identity=plan.identity(fingerprint),
            workers=workers,
            routes=routes,
            clients=clients,
            on_client_message=lambda: None,
            clock=StepClock(config.cell.step_timeout_factor, START_SECONDS),
        )
        compiler = start_compiler(plan)
        try:
            client.wait_until_ready(START_SECONDS)
            yield LocalCell(config, plan, client, compiler, fingerprint)
        finally:
            compiler.close()
            client.stop()
            _end(processes)


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.join(timeout=5.0)
        if process.is_alive():
            process.kill()
            process.join()


def _run_rank(
    plan: CellPlan,
    rank: int,
    store_port: int,
    engine_endpoint: str,
    route_endpoint: str,
    keys: PeerKeys,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the ranks
    use_one_compute_thread()
    worker = build_expert_worker(
        WorkerOptions(
            model_dir=plan.model_dir,
            rank=rank,
            ep_size=plan.ep_size,
            dtype=plan.dtype,
            device=cpu_device(),
            num_kv_blocks=plan.num_kv_blocks,
            block_size=plan.block_size,
            deterministic=plan.deterministic,
            dispatch=plan.dispatch,
            exchange="gloo",
            host_address=LOOPBACK,
            store_address=LOOPBACK,
            store_port=store_port,
            join_timeout_seconds=START_SECONDS,
            exchange_timeout_seconds=START_SECONDS,
        )
    )
    run_worker(
        worker,
        rank=rank,
        place=RankPlace(LOOPBACK, "cpu"),
        engine_endpoint=engine_endpoint,
        route_endpoint=route_endpoint,
        keys=keys,
    )
