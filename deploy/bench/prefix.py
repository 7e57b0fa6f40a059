"""`pointsman bench prefix`: what a prompt with a known prefix costs, by what is left of the prefix.

Every sample has a salt of its own, into which the prefix alone is computed first, so that prefix, tail and output are
the same in every row and the tail is never in the store. A repeat measures all rows one after the other, in an order of
its own, so that a machine that becomes slower or faster favours none:

    cold                  nothing is left
    evicted_negotiated    routes are left but not used: the gate chooses, dispatch is negotiated
    replay_negotiated     routes are left and replayed, dispatch is negotiated
    replay_planned_first  … replayed by plans that nobody has yet: compiled and sent meanwhile
    replay_planned        … by plans that every rank has
    kv_hit                KV is left
    kv_gate               KV is left, but hidden states of the whole prompt are needed: the pass goes over all of it,
                          reads KV where it is, the gate chooses, dispatch is negotiated
    kv_replay_planned     … by the routes, which travel by plans that every rank has
    kv_copy               KV is left in another buffer of this host and copied back: `kv_hit` of the same repeat plus
                          the copy of as many bytes, what a KV tier in host memory would take at least

Seconds, messages and bytes are those of the prefill: of all steps up to the first token. Messages and bytes are what
all ranks together sent to one another, payload only; an all-to-all is one message to every other rank, with rows or
without. A plan sends one message per pair of ranks with rows; from 8 ranks on, an MoE layer in which at least 90 % of
the pairs have some goes by all-to-all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.config import Config
from cluster.errors import CellError, ConfigError
from cluster.worker_messages import StepResult
from deploy.bench.local_cell import Generation, LocalCell, WatchedStep, local_cell
from deploy.cell_plan import CellPlan
from deploy.planning import plan_cell

WARM_UP_PREFIX_TOKENS = 512
PARTS = ("attention", "gate", "dispatch", "experts", "combine")


@dataclass(frozen=True)
class PrefixSizes:
    prefix_tokens: int
    tail_tokens: int
    output_tokens: int
    repeats: int

    @property
    def num_tokens(self) -> int:
        return self.prefix_tokens + self.tail_tokens + self.output_tokens

    def check(self, plan: CellPlan) -> None:
        """Raises ConfigError."""
        for flag, value, low in (
            ("--prefix-tokens", self.prefix_tokens, plan.block_size),
            ("--tail-tokens", self.tail_tokens, 1),
            ("--output-tokens", self.output_tokens, 2),
            ("--repeats", self.repeats, 1),
        ):
            if value < low:
                raise ConfigError(f"{flag} {value} is too small: at least {low}")
        if self.num_tokens > plan.max_model_len:
            raise ConfigError(
                f"{self.prefix_tokens} prefix, {self.tail_tokens} tail and {self.output_tokens} output "
                f"tokens exceed the context of {plan.max_model_len}: lower --prefix-tokens"
            )


@dataclass(frozen=True)
class _State:
    """What is left of the prefix, and what may be used of it.

    recompute: hidden states of every prompt token are needed
    plans: every rank has them, from a replay of the prefix that is not measured
    """

    seeded: bool = True
    kv: bool = False
    route_replay: bool = True
    planned_dispatch: bool = True
    recompute: bool = False
    plans: bool = False


_STATES: Mapping[str, _State] = {
    "cold": _State(seeded=False),
    "evicted_negotiated": _State(route_replay=False),
    "replay_negotiated": _State(planned_dispatch=False),
    "replay_planned_first": _State(),
    "replay_planned": _State(plans=True),
    "kv_hit": _State(kv=True),
    "kv_gate": _State(kv=True, route_replay=False, recompute=True),
    "kv_replay_planned": _State(kv=True, recompute=True, plans=True),
}
"""In the order of the report."""


@dataclass(frozen=True)
class Sample:
    generation: Generation
    copy_seconds: float = 0.0

    @property
    def ttft_seconds(self) -> float:
        return self.copy_seconds + self.generation.token_seconds[0]

    @property
    def forward_seconds(self) -> float:
        """Of the slowest rank of each step."""
        return self._sum(lambda step: max(r.timings.forward for r in step.results))

    @property
    def control_seconds(self) -> float:
        return self.generation.token_seconds[0] - self.forward_seconds

    @property
    def output_tokens_per_second(self) -> float:
        seconds = self.generation.token_seconds
        return (len(seconds) - 1) / (seconds[-1] - seconds[0])

    @property
    def request_seconds(self) -> float:
        """Until the last token."""
        return self.copy_seconds + self.generation.token_seconds[-1]

    def part_seconds(self, part: str) -> float:
        """Of the request's home rank, which all others wait for and which waits for all others."""
        return self._sum(lambda step: float(getattr(_at_home(step).timings, part)))

    def other_seconds(self) -> float:
        return self.forward_seconds - sum(map(self.part_seconds, PARTS))

    @property
    def num_messages(self) -> int:
        """Of all ranks."""
        return sum(r.sent.messages for step in self.generation.prefill for r in step.results)

    @property
    def num_gate_tokens(self) -> int:
        """Of all ranks."""
        return sum(r.gate_tokens for step in self.generation.prefill for r in step.results)

    @property
    def num_bytes(self) -> int:
        """Of all ranks."""
        return sum(r.sent.bytes for step in self.generation.prefill for r in step.results)

    def _sum(self, seconds: Callable[[WatchedStep], float]) -> float:
        return sum(map(seconds, self.generation.prefill))


def _at_home(step: WatchedStep) -> StepResult:
    return next(result for result in step.results if result.rank in step.home_ranks)


def run(config: Config, sizes: PrefixSizes) -> list[dict[str, Any]]:
    """Raises ConfigError for sizes that do not fit, CellError when rows disagree in their output."""
    plan = plan_cell(config)
    sizes.check(plan)
    warm_up = PrefixSizes(
        min(sizes.prefix_tokens, WARM_UP_PREFIX_TOKENS), sizes.tail_tokens, sizes.output_tokens, 1
    )
    with local_cell(config, plan) as cell:
        bench = _Bench(cell, plan)
        bench.repeat("warm-up", warm_up)
        repeats = [bench.repeat(str(number), sizes) for number in range(sizes.repeats)]
    return [
        row_of(
            name,
            [samples[name] for samples in repeats],
            ep_size=plan.ep_size,
            num_prompt_tokens=sizes.prefix_tokens + sizes.tail_tokens,
        )
        for name in (*_STATES, "kv_copy")
    ]


def run_order(random: np.random.Generator) -> list[str]:
    """Draws the order of one repeat."""
    order: list[str] = random.permutation(list(_STATES)).tolist()
    return order


class _Bench:
    """Owner of the prompts and of the buffers of kv_copy."""

    def __init__(self, cell: LocalCell, plan: CellPlan) -> None:
        self._cell = cell
        self._plan = plan
        self._random = np.random.default_rng(0)

    def repeat(self, label: str, sizes: PrefixSizes) -> dict[str, Sample]:
        """All rows, on a prefix that is new."""
        num_prompt = sizes.prefix_tokens + sizes.tail_tokens
        prompt = self._random.integers(0, self._plan.spec.vocab_size, num_prompt, np.int32)
        samples = {
            name: Sample(self._generate(f"{label}-{name}", _STATES[name], prompt, sizes))
            for name in run_order(self._random)
        }
        hit = samples["kv_hit"].generation
        num_bytes = hit.completion.cached_tokens * self._plan.kv_bytes_per_token
        samples["kv_copy"] = Sample(hit, _copy_seconds(num_bytes))
        check_equal(samples)
        return samples

    def _generate(
        self, salt: str, state: _State, prompt: npt.NDArray[np.int32], sizes: PrefixSizes
    ) -> Generation:
        engine = self._cell.engine
        engine.evict("all")  # nothing of other samples takes part, not even by being evicted
        prefix = prompt[: sizes.prefix_tokens].tolist()
        if state.seeded:
            self._cell.generate(f"{salt}-seed", prefix, 1, salt)
        if state.plans:
            engine.evict("kv")
            engine.set_features(route_replay=True, planned_dispatch=True)
            self._cell.generate(f"{salt}-plans", prefix, 1, salt)
        if not state.kv:
            engine.evict("kv")
        engine.set_features(
            route_replay=state.route_replay, planned_dispatch=state.planned_dispatch
        )
        return self._cell.generate(
            salt, prompt.tolist(), sizes.output_tokens, salt, recompute_prompt=state.recompute
        )


def _copy_seconds(num_bytes: int) -> float:
    """Between two buffers of this host that are both mapped already."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    target.fill(2)
    started = perf_counter()
    np.copyto(target, source)
    return perf_counter() - started


def check_equal(samples: Mapping[str, Sample]) -> None:
    expected = samples["cold"].generation.token_ids
    for name, sample in samples.items():
        token_ids = sample.generation.token_ids
        if token_ids != expected:
            first = next(i for i, token_id in enumerate(token_ids) if token_id != expected[i])
            raise CellError(
                f"row {name} generated token {token_ids[first]} at output position {first}, cold "
                f"{expected[first]}: nothing is measured; --deterministic makes all rows exactly equal"
            )


def row_of(
    name: str, samples: Sequence[Sample], *, ep_size: int, num_prompt_tokens: int
) -> dict[str, Any]:
    """One sample per repeat.

    Seconds, messages and bytes are medians over the repeats of sums over the prefill steps, messages and bytes over the
    ranks too; rates follow from medians. The 99th percentile is a sample, the slowest one of up to 100.

    gate_tokens                prefill tokens that met the gate, on all ranks, in the repeat with the most
    tokens_per_second          prompt tokens by the time to the first token: says no more than that time
    request_tokens_per_second  prompt and output tokens by the time to the last token
    """
    num_output_tokens = len(samples[0].generation.token_ids)
    ttft = [sample.ttft_seconds for sample in samples]
    parts = {f"{part}_seconds": _median([s.part_seconds(part) for s in samples]) for part in PARTS}
    generations = [sample.generation for sample in samples]
    return {
        "row": name,
        "ep_size": ep_size,
        **parts,
        "other_seconds": _median([s.other_seconds() for s in samples]),
        "control_seconds": _median([s.control_seconds for s in samples]),
        "messages": round(median(s.num_messages for s in samples)),
        "bytes": round(median(s.num_bytes for s in samples)),
        "copy_seconds": _median([s.copy_seconds for s in samples]),
        "ttft_seconds_min": round(min(ttft), 5),
        "ttft_seconds_p50": _median(ttft),
        "ttft_seconds_p99": round(float(np.percentile(ttft, 99, method="higher")), 5),
        "tokens_per_second": round(num_prompt_tokens / median(ttft), 1),
        "request_tokens_per_second": round(
            (num_prompt_tokens + num_output_tokens) / median(s.request_seconds for s in samples), 1
        ),
        "output_tokens_per_second": round(median(s.output_tokens_per_second for s in samples), 1),
        "repeats": len(samples),
        "prefill_steps": min(len(g.prefill) for g in generations),
        "cached_tokens": min(g.completion.cached_tokens for g in generations),
        "replayed_tokens": min(
            sum(step.num_replayed_tokens for step in g.prefill) for g in generations
        ),
        "planned_tokens": min(
            sum(step.num_planned_tokens for step in g.prefill) for g in generations
        ),
        "gate_tokens": max(s.num_gate_tokens for s in samples),
        "compiled_fragments": max(g.num_compiled_fragments for g in generations),
    }


def _median(seconds: Sequence[float]) -> float:
    return round(median(seconds), 5)
