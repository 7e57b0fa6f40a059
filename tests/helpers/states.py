"""Ways in which a cell can come to compute a request: cold, from the prefix store, among others, after a preemption.

Each state drives engines over running ranks and returns what every request computed and answered.
Letters: T tokens that a request computes (prompt + output − 1), V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cluster.messages import Completion
from cluster.routes import ExpertRoutes
from cluster.types import Rank
from router_service.clients import Workers
from tests.helpers.cells import CellOptions, RunningRanks, running_ranks
from tests.helpers.engines import EngineHarness, make_namespace
from tests.helpers.observation import LogitRows, Observations, build_observed_worker

State = Literal[
    *("cold", "kv_hit", "replay", "evicted", "mixed", "preempted"),
    *("planned", "planned_mixed", "planned_preempted"),
    *("again_gate", "again_negotiated", "again_planned"),
]
STATES: tuple[State, ...] = ("cold", "kv_hit", "replay", "evicted", "mixed", "preempted")
STORED_STATES = STATES[:4]
PLANNED_STATES: tuple[State, ...] = ("planned", "planned_mixed", "planned_preempted")
"""Replays travel by plans: of a prompt alone, of a batch in which others decode, after a preemption."""
AGAIN_STATES: tuple[State, ...] = ("again_gate", "again_negotiated", "again_planned")
"""The pass goes over the whole prompt once more while its KV is there: by the gate, by its routes, by plans."""
MAX_FRAGMENT_TOKENS = 128
BATCH_SIZE = 8
BLOCK_SIZE = 16
NEIGHBOUR_TOKENS = (5, 20, 37, 3, 50, 18, 9)
"""Prompt lengths of the requests beside a single one in a mixed batch."""
OLDER_PROMPT_TOKENS = 14
"""Two decodes before a block border, beyond which it needs what the younger one holds."""


def altered(routes: ExpertRoutes, token: int, num_experts: int) -> ExpertRoutes:
    """The last expert of one token in the first MoE layer replaced by one that the token did not choose."""
    ids = routes.topk_ids.copy()
    chosen = set(ids[token, 0].tolist())
    ids[token, 0, -1] = next(e for e in reversed(range(num_experts)) if e not in chosen)
    ids[token, 0].sort()
    return ExpertRoutes(ids, routes.topk_weights)


def random_prompt(num_tokens: int, seed: int, vocab_size: int = 3072) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, vocab_size, num_tokens).tolist()
    return tokens


@dataclass(frozen=True, eq=False)
class RequestRun:
    """What one request answered, and the logits of every chunk that was computed for it, in order of steps."""

    prompt: list[int]
    token_ids: list[int]
    completion: Completion
    routes: ExpertRoutes
    """[T, L, K]; none of a request that asked for none."""
    chunks: list[LogitRows]

    @property
    def computed_token_ids(self) -> list[int]:
        """Everything that was put in: the prompt and all but the last output token."""
        return [*self.prompt, *self.token_ids[:-1]]

    @property
    def num_computed(self) -> int:
        """Tokens computed for it, those that were computed again counted again."""
        return sum(len(chunk.logits) for chunk in self.chunks)

    def logits(self) -> npt.NDArray[np.float32]:
        """[T, V] of a request that computed every token once."""
        assert self.num_computed == len(self.computed_token_ids)
        return np.concatenate([chunk.logits for chunk in self.chunks])


@dataclass(frozen=True)
class ObservedRanks:
    """Running ranks whose logits can be read."""

    ranks: RunningRanks
    observations: Observations

    def bench(self, workers: Workers | None = None, **engine: Any) -> "Bench":
        return Bench(self, self.ranks.engine(workers, **engine))


@contextmanager
def observed_ranks(model_dir: Path, **options: Any) -> Iterator[ObservedRanks]:
    """Forked ranks of one model; options as of CellOptions."""
    with TemporaryDirectory(prefix="pointsman-", dir=_memory_directory()) as name:
        build_worker = partial(build_observed_worker, Path(name))
        cell = CellOptions(model_dir, build_worker=build_worker, **options)
        with running_ranks(cell) as ranks:
            observations = Observations(Path(name), cell.ep_size, ranks.spec.vocab_size)
            yield ObservedRanks(ranks, observations)


def _memory_directory() -> str | None:
    """Logits are many: written to memory where the system has such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


class Bench:
    """One engine with an empty store. Owner of its requests, which go by their seq_id."""

    def __init__(self, observed: ObservedRanks, harness: EngineHarness) -> None:
        self.harness = harness
        self._observations = observed.observations
        self._route_shape = observed.ranks.spec.route_shape
        self._prompts: list[list[int]] = []
        self._chunks: dict[int, list[LogitRows]] = {}
        self._observations.take()

    def submit(self, prompt: list[int], max_tokens: int, **sampling: Any) -> int:
        """Returns the seq_id: the engine counts submits."""
        seq_id = len(self._prompts)
        self._prompts.append(prompt)
        self.harness.submit(f"r{seq_id}", prompt, max_tokens, **sampling)
        return seq_id

    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.harness.step()

    def finish(self) -> None:
        """Runs until all requests have ended."""
        self.harness.run()
        for seq_id, chunks in self._observations.take().items():
            self._chunks.setdefault(seq_id, []).extend(chunks)

    def run_of(self, seq_id: int) -> RequestRun:
        generation = self.harness.generations[f"r{seq_id}"]
        assert generation.completion is not None
        chunks = self._chunks.get(seq_id, [])
        routes = ExpertRoutes.empty(self._route_shape)
        if generation.route_parts:
            routes = generation.routes
        return RequestRun(
            self._prompts[seq_id], generation.token_ids, generation.completion, routes, chunks
        )

    def is_under_way(self, seq_id: int) -> bool:
        return self.harness.generations[f"r{seq_id}"].completion is None

    def generate(self, prompt: list[int], max_tokens: int, **sampling: Any) -> RequestRun:
        """One request alone."""
        seq_id = self.submit(prompt, max_tokens, **sampling)
        self.finish()
        return self.run_of(seq_id)

    @property
    def num_gate_tokens(self) -> int:
        """Of the metric."""
        (metric,) = self.harness.metrics.gate_tokens.collect()
        return int(metric.samples[0].value)

    @property
    def replayed_tokens(self) -> dict[str, int]:
        """By the way that they travelled, planned or negotiated."""
        (metric,) = self.harness.metrics.replayed_tokens.collect()
        samples = (sample for sample in metric.samples if sample.name.endswith("_total"))
        return {sample.labels["dispatch"]: int(sample.value) for sample in samples}

    @property
    def num_preemptions(self) -> int:
        return self.harness.scheduler.num_preemptions

    def plant_routes(self, token_ids: list[int], routes: ExpertRoutes, salt: str) -> None:
        """Leaves routes of full blocks in the store as if some request had computed them, without KV."""
        store, tokens = self.harness.store, np.array(token_ids, np.int32)
        num_blocks = routes.num_tokens // BLOCK_SIZE
        if num_blocks == 0:
            return
        block_ids = store.allocate(Rank(0), num_blocks)
        assert block_ids is not None
        full = routes.slice(0, num_blocks * BLOCK_SIZE)
        lease = store.acquire(make_namespace(self.harness.fingerprint, None, salt), tokens, 0)
        publication = store.publish(lease, Rank(0), tokens, 0, block_ids, full)
        assert publication.outcomes == ("added",) * num_blocks
        store.release(lease)
        store.evict("kv")


def run_state(
    observed: ObservedRanks,
    state: State,
    budget: int,
    prompts: Sequence[list[int]],
    max_tokens: int,
) -> list[RequestRun]:
    """One run per prompt. `budget`: tokens of a rank in a step, the longest chunk."""
    if state == "mixed":
        return _mixed(observed.bench(budget=budget), prompts, max_tokens)
    if state == "preempted":
        return [_preempted(observed, budget, prompt, max_tokens) for prompt in prompts]
    if state in PLANNED_STATES:
        return _planned(observed, state, budget, prompts, max_tokens)
    if state in AGAIN_STATES:
        return _again(observed, state, budget, prompts, max_tokens)
    bench = observed.bench(budget=budget)
    cold = [bench.generate(prompt, max_tokens) for prompt in prompts]
    if state == "cold":
        return cold
    if state == "replay":
        bench.harness.engine.evict("kv")
    if state == "evicted":
        bench.harness.engine.evict("routes")
    return [bench.generate(prompt, max_tokens) for prompt in prompts]


def run_stored_states(
    observed: ObservedRanks, budget: int, prompts: Sequence[list[int]], max_tokens: int
) -> dict[State, list[RequestRun]]:
    """The states that one engine passes through, cold only once."""
    bench = observed.bench(budget=budget)
    engine = bench.harness.engine
    runs: dict[State, list[RequestRun]] = {}
    for state in STORED_STATES:
        if state == "replay":
            engine.evict("kv")
        if state == "evicted":
            engine.evict("all")
        runs[state] = [bench.generate(prompt, max_tokens) for prompt in prompts]
    return runs


def run_injected(
    observed: ObservedRanks,
    budget: int,
    prompts: Sequence[list[int]],
    routes: Sequence[ExpertRoutes],
    max_tokens: int,
) -> list[RequestRun]:
    """Full blocks of every prompt replay the given routes; the gate chooses for the rest."""
    bench = observed.bench(budget=budget)
    for number, (prompt, record) in enumerate(zip(prompts, routes, strict=True)):
        bench.plant_routes(prompt, record, salt=f"injected-{number}")
    runs = [
        bench.generate(prompt, max_tokens, cache_salt=f"injected-{number}")
        for number, prompt in enumerate(prompts)
    ]
    for run in runs:
        assert run.completion.replayed_tokens == len(run.prompt) // BLOCK_SIZE * BLOCK_SIZE
    return runs


def _mixed(bench: Bench, prompts: Sequence[list[int]], max_tokens: int) -> list[RequestRun]:
    """Half of the batch is decoding when the other half arrives. One neighbour shares half of the first prompt."""
    neighbours = [random_prompt(n, seed=900 + n) for n in NEIGHBOUR_TOKENS]
    neighbours[3] = [*prompts[0][: len(prompts[0]) // 2], *neighbours[3]]
    batch = [*neighbours[: max(0, BATCH_SIZE - len(prompts))], *prompts]
    seq_ids = []
    for place, prompt in enumerate(batch):
        if place == len(batch) // 2:
            bench.step(3)
        seq_ids.append(bench.submit(prompt, max_tokens + place % 3))
    bench.finish()
    runs = [bench.run_of(seq_id) for seq_id in seq_ids[-len(prompts) :]]
    return [_shortened(run, max_tokens) for run in runs]


def _shortened(run: RequestRun, max_tokens: int) -> RequestRun:
    """The same request had it asked for fewer tokens."""
    num_tokens = len(run.prompt) + max_tokens - 1
    routes = run.routes.slice(0, num_tokens)
    completion = Completion(
        finish_reason=run.completion.finish_reason,
        error=run.completion.error,
        num_output_tokens=max_tokens,
        cached_tokens=run.completion.cached_tokens,
        replayed_tokens=run.completion.replayed_tokens,
    )
    chunks = [
        LogitRows(chunk.first_position, chunk.logits[: num_tokens - chunk.first_position])
        for chunk in run.chunks
        if chunk.first_position < num_tokens
    ]
    return RequestRun(run.prompt, run.token_ids[:max_tokens], completion, routes, chunks)


def _planned(
    observed: ObservedRanks,
    state: State,
    budget: int,
    prompts: Sequence[list[int]],
    max_tokens: int,
) -> list[RequestRun]:
    """As the state of the same name without plans."""
    fragment_tokens = _fragment_tokens(budget)
    if state == "planned_preempted":
        return [
            _preempted(observed, budget, prompt, max_tokens, fragment_tokens=fragment_tokens)
            for prompt in prompts
        ]
    bench = observed.bench(budget=budget, fragment_tokens=fragment_tokens)
    for prompt in prompts:
        bench.generate(prompt, max_tokens)
    bench.harness.engine.evict("kv")
    if state == "planned_mixed":
        runs = _mixed(bench, prompts, max_tokens)
    else:
        runs = [bench.generate(prompt, max_tokens) for prompt in prompts]
    _assert_planned(bench)
    has_blocks = any(len(prompt) >= BLOCK_SIZE for prompt in prompts)
    assert (bench.replayed_tokens["planned"] > 0) == has_blocks, "the state was not reached"
    return runs


def _again(
    observed: ObservedRanks,
    state: State,
    budget: int,
    prompts: Sequence[list[int]],
    max_tokens: int,
) -> list[RequestRun]:
    """Every prompt token is computed twice and its KV written once."""
    planned = state == "again_planned"
    bench = observed.bench(budget=budget, fragment_tokens=_fragment_tokens(budget) * planned)
    for prompt in prompts:
        bench.generate(prompt, max_tokens)
    bench.harness.features.route_replay = state != "again_gate"
    runs = [bench.generate(prompt, max_tokens, recompute_prompt=True) for prompt in prompts]
    for run in runs:
        stored = (len(run.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert run.completion.cached_tokens == 0
        assert state == "again_gate" or run.completion.replayed_tokens >= stored
    if planned:
        _assert_planned(bench)
    return runs


def _fragment_tokens(budget: int) -> int:
    """One that fits a step beside some decodes."""
    return max(1, min(budget // 2, MAX_FRAGMENT_TOKENS))


def _assert_planned(bench: Bench) -> None:
    assert bench.replayed_tokens["negotiated"] == 0, "the state was not reached: not by a plan"


def _preempted(
    observed: ObservedRanks, budget: int, prompt: list[int], max_tokens: int, **engine: Any
) -> RequestRun:
    """On each rank an older request grows until the blocks do not suffice for both, and the younger has to go.

    With a budget of 1 the older one would take every step and a younger one never hold a block; with 2 the younger
    still computes one token per step.
    """
    budget, num_tokens = max(budget, 2), len(prompt)
    num_blocks = max(_blocks(num_tokens + max_tokens), _blocks(num_tokens) + 1)
    room = num_blocks * BLOCK_SIZE - OLDER_PROMPT_TOKENS
    older_max_tokens = min(num_tokens // budget + 12, room)
    bench = observed.bench(budget=budget, num_kv_blocks=num_blocks, **engine)
    for rank in range(observed.ranks.options.ep_size):
        bench.submit(random_prompt(OLDER_PROMPT_TOKENS, seed=800 + rank), older_max_tokens)
    run = bench.generate(prompt, max_tokens)
    assert bench.num_preemptions > 0, "the state was not reached: nobody was preempted"
    if "fragment_tokens" in engine:
        _assert_planned(bench)
    return run


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)
