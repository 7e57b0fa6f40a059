"""Workers whose steps replay by plan, on the demo model: the same bytes as through gates, refusals before any exchange.

The measure is one cold run of the same number of ranks, all of it on rank 0 and through gates; deterministic numerics
make every other way equal to it.

Letters: T tokens, L layers, w KV width, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pytest
from torch.autograd.profiler import profile

from cluster.dispatch_plan import PlanFragment
from cluster.errors import CellError
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes
from cluster.types import Rank
from cluster.worker_messages import RouteChunk, SequenceStart, StepDescriptor
from expert_workers.inputs_from_step import StepRefusedError
from expert_workers.worker import ExpertWorker
from expert_workers.worker_builder import build_expert_worker
from prefix_store.plan_compiler import compile_fragment
from tests.expert_workers.dispatch.plan_cases import plan_part
from tests.expert_workers.driving import (
    BLOCK_SIZE,
    SPEC,
    ChunkSpec,
    make_options,
    make_prompt,
    make_step,
    routes_by_chunk,
)
from tests.helpers.observation import Observations, build_observed_worker
from tests.helpers.ranks import RankContext, run_ranks

FRAGMENT_TOKENS = 128
PROMPTS = [make_prompt(n, seed=50 + n) for n in (300, 150, 37, 20)]
FIRST_BLOCKS = [0, 19, 30, 34]
"""Of each prompt in the cold run; blocks from 38 on are free."""
SECOND_PLACE = range(40, 60)


@dataclass(frozen=True, eq=False)
class Computed:
    """Of one sequence. logits: [T, V] in order of computation; kv: [L, T, w] of the blocks that it was told to use."""

    token_ids: list[int]
    logits: npt.NDArray[np.float32]
    kv: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Script:
    """What every rank of a cell is told, step after step."""

    steps: Sequence[Sequence[ChunkSpec]]
    fragments: dict[int, PlanFragment] = field(default_factory=dict)
    routes: Sequence[RouteChunk] = ()
    gates_are_nan: bool = False


@dataclass(frozen=True)
class _RankStory:
    """token_ids and kv by seq_id; routes by seq_id as recorded; gate_tokens and expert_load step by step."""

    token_ids: dict[int, list[int]]
    kv: dict[int, npt.NDArray[np.float32]]
    routes: dict[int, list[ExpertRoutes]]
    gate_tokens: list[int]
    expert_load: list[npt.NDArray[np.int32]]


@dataclass(frozen=True)
class CellStory:
    """computed and routes: by seq_id; gate_tokens: step by step, of all ranks; expert_load: [L, experts] per step."""

    computed: dict[int, Computed]
    routes: dict[int, ExpertRoutes]
    gate_tokens: list[int]
    expert_load: list[npt.NDArray[np.int32]]


def run_script(ep_size: int, script: Script) -> CellStory:
    with TemporaryDirectory(prefix="pointsman-") as name:
        observations = Observations(Path(name), ep_size, SPEC.vocab_size)
        if script.gates_are_nan:
            observations.poison_gates()
        stories = run_ranks(ep_size, lambda context: _play(context, script, Path(name)))
        logits = observations.take()
    computed = {
        seq_id: Computed(
            token_ids, np.concatenate([r.logits for r in logits[seq_id]]), story.kv[seq_id]
        )
        for story in stories
        for seq_id, token_ids in story.token_ids.items()
    }
    return CellStory(
        computed,
        {
            seq_id: ExpertRoutes.concatenate(routes, SPEC.route_shape)
            for story in stories
            for seq_id, routes in story.routes.items()
        },
        [sum(tokens) for tokens in zip(*(s.gate_tokens for s in stories), strict=True)],
        [np.concatenate(load, 1) for load in zip(*(s.expert_load for s in stories), strict=True)],
    )


def _play(context: RankContext, script: Script, directory: Path) -> _RankStory:
    worker = build_observed_worker(
        directory, make_options(context.rank, context.ep_size), context.store()
    )
    tell_plans(worker, script.fragments)
    for chunk in script.routes:
        worker.add_route_chunk(chunk)
    story = _RankStory({}, {}, {}, [], [])
    for step_id, chunks in enumerate(script.steps):
        mine = [c for c in chunks if c.rank == context.rank]
        for c in mine:
            worker.start_sequence(SequenceStart(c.seq_id, 0.0, 1.0, 0))
        outcome = worker.execute(step_of(step_id, chunks, context.ep_size))
        assert outcome.result.poisoned_seq_ids == []
        story.gate_tokens.append(outcome.result.gate_tokens)
        story.expert_load.append(outcome.result.expert_load)
        sampled = zip(outcome.result.seq_ids, outcome.result.token_ids, strict=True)
        for c in mine:
            story.token_ids.setdefault(c.seq_id, [])
            story.kv[c.seq_id] = kv_rows(worker, c)
        for seq_id, token_id in sampled:
            story.token_ids[seq_id].append(token_id)
        if outcome.routes is not None:
            for seq_id, routes in routes_by_chunk(outcome.routes):
                story.routes.setdefault(seq_id, []).append(routes)
    return story


def tell_plans(worker: ExpertWorker, fragments: dict[int, PlanFragment]) -> None:
    for fragment_id, fragment in fragments.items():
        worker.add_plan_part(plan_part(fragment, fragment_id, worker.rank))


def kv_rows(worker: ExpertWorker, chunk: ChunkSpec) -> npt.NDArray[np.float32]:
    """[L, T, w] of the whole sequence so far."""
    positions = np.arange(chunk.first_position + len(chunk.token_ids))
    slots = np.array(chunk.blocks)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    rows: npt.NDArray[np.float32] = worker.kv_pool.rows[:, slots].numpy()
    return rows


def step_of(step_id: int, chunks: Sequence[ChunkSpec], ep_size: int) -> StepDescriptor:
    return make_step(step_id, chunks, dispatch="local" if ep_size == 1 else "negotiated")


def prompt_chunk(number: int, **changes: object) -> ChunkSpec:
    """The whole prompt through the gate, by default as the cold run computes it."""
    tokens = PROMPTS[number]
    first_block = FIRST_BLOCKS[number]
    blocks = range(first_block, first_block + -(-(len(tokens) + 1) // BLOCK_SIZE))
    return replace(ChunkSpec(number, tokens, blocks), **changes)  # type: ignore[arg-type]


def decode_chunk(prompt: ChunkSpec, number: int, ep_size: int) -> ChunkSpec:
    """The token after a prompt, through the gate. `prompt`: where the sequence is."""
    return replace(
        prompt,
        token_ids=cold(ep_size).computed[number].token_ids[:1],
        first_position=len(PROMPTS[number]),
        fragment_ids=(),
        route_id=-1,
    )


@cache
def cold(ep_size: int) -> CellStory:
    """Every prompt and one token after it."""
    prompts = [prompt_chunk(number) for number in range(len(PROMPTS))]
    first = run_script(ep_size, Script([prompts]))
    after = [
        replace(c, token_ids=first.computed[c.seq_id].token_ids, first_position=len(c.token_ids))
        for c in prompts
    ]
    return run_script(ep_size, Script([prompts, after]))


def fragments_of(number: int, source: int, ep_size: int, first_id: int) -> dict[int, PlanFragment]:
    """Of a whole prompt's routes."""
    routes = cold(ep_size).routes[number].slice(0, len(PROMPTS[number]))
    placement = ExpertPlacement.contiguous(SPEC.gate.num_experts, ep_size)
    starts = range(0, routes.num_tokens, FRAGMENT_TOKENS)
    return {
        first_id + i: compile_fragment(
            routes.slice(start, min(start + FRAGMENT_TOKENS, routes.num_tokens)),
            Rank(source),
            placement,
            first_position=start,
        )
        for i, start in enumerate(starts)
    }


def check_as_cold(computed: Computed, number: int, ep_size: int) -> None:
    """To the byte, as far as it was computed."""
    expected = cold(ep_size).computed[number]
    num_tokens = computed.kv.shape[1]
    assert num_tokens >= len(PROMPTS[number])
    assert computed.token_ids == expected.token_ids[: len(computed.token_ids)]
    assert computed.logits.tobytes() == expected.logits[:num_tokens].tobytes()
    assert computed.kv.tobytes() == expected.kv[:, :num_tokens].tobytes()


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_a_prompt_replayed_by_plan_has_the_bytes_of_its_negotiated_prefill(ep_size: int) -> None:
    home = ep_size - 1
    fragments = fragments_of(0, home, ep_size, first_id=5)
    replayed = prompt_chunk(
        0, seq_id=9, rank=home, blocks=SECOND_PLACE, fragment_ids=list(fragments)
    )
    script = Script(
        [[prompt_chunk(0)], [replayed], [decode_chunk(replayed, 0, ep_size)]], fragments=fragments
    )
    story = run_script(ep_size, script)
    check_as_cold(story.computed[0], 0, ep_size)
    check_as_cold(story.computed[9], 0, ep_size)
    assert len(story.computed[9].token_ids) == 2
    assert story.gate_tokens == [300, 0, 1]
    np.testing.assert_array_equal(story.expert_load[0], story.expert_load[1])


def test_a_prompt_may_be_planned_in_several_steps_of_whole_fragments() -> None:
    fragments = fragments_of(0, 0, 2, first_id=0)
    parts = [
        prompt_chunk(0, token_ids=PROMPTS[0][:256], samples=False, fragment_ids=[0, 1]),
        prompt_chunk(0, token_ids=PROMPTS[0][256:], first_position=256, fragment_ids=[2]),
    ]
    story = run_script(2, Script([[part] for part in parts], fragments=fragments))
    check_as_cold(story.computed[0], 0, 2)
    assert story.gate_tokens == [0, 0]


@pytest.mark.parametrize("ep_size", [2, 4])
def test_ranks_that_replay_by_plan_and_ranks_that_decode_share_a_step(ep_size: int) -> None:
    fragments = fragments_of(1, 1, ep_size, first_id=0)
    mixed = [
        decode_chunk(prompt_chunk(0), 0, ep_size),
        prompt_chunk(1, rank=1, fragment_ids=list(fragments)),
    ]
    story = run_script(ep_size, Script([[prompt_chunk(0)], mixed], fragments=fragments))
    check_as_cold(story.computed[0], 0, ep_size)
    check_as_cold(story.computed[1], 1, ep_size)
    assert story.gate_tokens == [300, 1]
    num_choices = 151 * SPEC.gate.num_experts_per_tok
    assert story.expert_load[1].sum(axis=1).tolist() == [num_choices] * SPEC.num_moe_layers


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_gate_negotiated_replay_and_plans_share_a_step_of_one_rank(ep_size: int) -> None:
    """Chunks of all kinds in turn, two of them planned, and another rank with one of its own where there is one."""
    home, last = 0, ep_size - 1
    fragments = (
        fragments_of(1, home, ep_size, first_id=0)
        | fragments_of(3, home, ep_size, first_id=10)
        | fragments_of(2, last, ep_size, first_id=20)
    )
    routes = cold(ep_size).routes[2].slice(0, len(PROMPTS[2]))
    step = [
        prompt_chunk(1, rank=home, fragment_ids=[0, 1]),
        prompt_chunk(0, rank=home),
        prompt_chunk(2, rank=home, route_id=8),
        prompt_chunk(3, rank=home, fragment_ids=[10]),
        prompt_chunk(2, seq_id=9, rank=last, fragment_ids=[20], blocks=SECOND_PLACE),
    ]
    route_chunk = RouteChunk(8, 0, routes.topk_ids, routes.topk_weights)
    story = run_script(ep_size, Script([step], fragments=fragments, routes=[route_chunk]))
    for seq_id, number in ((0, 0), (1, 1), (2, 2), (3, 3), (9, 2)):
        check_as_cold(story.computed[seq_id], number, ep_size)
    assert story.gate_tokens == [300]


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_a_planned_step_needs_no_gate(ep_size: int) -> None:
    last = ep_size - 1
    fragments = fragments_of(0, 0, ep_size, 0) | fragments_of(1, last, ep_size, 10)
    step = [
        prompt_chunk(0, fragment_ids=[0, 1, 2]),
        prompt_chunk(1, rank=last, fragment_ids=[10, 11]),
    ]
    story = run_script(ep_size, Script([step], fragments=fragments, gates_are_nan=True))
    check_as_cold(story.computed[0], 0, ep_size)
    check_as_cold(story.computed[1], 1, ep_size)
    assert story.gate_tokens == [0]


PLANNED = prompt_chunk(1, fragment_ids=[0, 1], samples=False)


@pytest.mark.parametrize("with_gate", [False, True], ids=["planned only", "beside a gate"])
def test_a_planned_step_sends_rows_between_pairs_and_starts_collectives_only_for_a_gate(
    with_gate: bool,
) -> None:
    fragments = fragments_of(1, 0, 4, first_id=0)
    chunks = [PLANNED, *([prompt_chunk(3, rank=3, samples=False)] if with_gate else [])]

    def gloo_calls(context: RankContext) -> dict[str, int]:
        worker = planning_worker(context, fragments)
        with profile() as profiler:
            worker.execute(step_of(0, chunks, 4))
        events = profiler.key_averages()
        return {event.key: event.count for event in events if event.key.startswith("gloo:")}

    layers = SPEC.num_moe_layers
    collectives = {"gloo:all_to_all": 3 * layers} if with_gate else {}
    first, *others = run_ranks(4, gloo_calls)
    assert first == {"gloo:send": 3 * layers, "gloo:recv": 3 * layers} | collectives
    assert others == [{"gloo:send": layers, "gloo:recv": layers} | collectives] * 3


@pytest.mark.parametrize(
    ("chunks", "evicted", "reason"),
    [
        ([replace(PLANNED, route_id=4)], [], "2 plan fragments and route 4"),
        ([replace(PLANNED, fragment_ids=[0])], [], r"cover 128 tokens, its chunk has 150"),
        ([replace(PLANNED, fragment_ids=[0, 1, 1])], [], r"cover 172 tokens, its chunk has 150"),
        ([replace(PLANNED, rank=1)], [], "compiled for rank 0"),
        ([replace(PLANNED, fragment_ids=[0, 77])], [], "names plan fragment 77"),
        ([PLANNED], [1], r"names and evicts plan fragments \[1\]"),
        ([replace(PLANNED, rank=1), PLANNED], [], r"ranks are \[1, 0\]"),
    ],
)
def test_all_ranks_refuse_a_bad_plan_alike_and_can_still_run_a_good_one(
    chunks: list[ChunkSpec], evicted: list[int], reason: str
) -> None:
    fragments = fragments_of(1, 0, 2, first_id=0)

    def refuse_then_run(context: RankContext) -> bool:
        worker = planning_worker(context, fragments)
        bad = make_step(0, chunks, dispatch="negotiated", evicted_fragment_ids=evicted)
        with pytest.raises(StepRefusedError, match=reason):
            worker.execute(bad)
        worker.execute(step_of(1, [PLANNED], 2))
        return True

    assert run_ranks(2, refuse_then_run) == [True, True]


def planning_worker(context: RankContext, fragments: dict[int, PlanFragment]) -> ExpertWorker:
    options = make_options(context.rank, context.ep_size)
    worker = build_expert_worker(options, store=context.store())
    tell_plans(worker, fragments)
    return worker


def test_evicted_fragments_can_be_named_by_no_later_step() -> None:
    fragments = fragments_of(1, 0, 2, first_id=0) | fragments_of(2, 0, 2, first_id=5)

    def evict_then_name(context: RankContext) -> bool:
        worker = planning_worker(context, fragments)
        kept = prompt_chunk(2, fragment_ids=[5], samples=False)
        worker.execute(make_step(0, [kept], dispatch="negotiated", evicted_fragment_ids=[0, 1, 99]))
        with pytest.raises(StepRefusedError, match="names plan fragment 0"):
            worker.execute(step_of(1, [PLANNED], 2))
        worker.execute(step_of(2, [kept], 2))
        return True

    assert run_ranks(2, evict_then_name) == [True, True]


@pytest.mark.parametrize("other_chunk", [False, True], ids=["planned only", "beside a gate"])
def test_a_rank_that_lacks_a_part_fails_alone_and_the_others_end_in_bounded_time(
    other_chunk: bool,
) -> None:
    fragments = fragments_of(1, 0, 4, first_id=0)
    chunks = [PLANNED, *([prompt_chunk(3, rank=3, samples=False)] if other_chunk else [])]

    def seconds_until_error(context: RankContext) -> tuple[str, float]:
        held = {0: fragments[0]} if context.rank == 2 else fragments
        worker = planning_worker(context, held)
        started = time.monotonic()
        try:
            worker.execute(step_of(0, chunks, 4))
        except CellError as error:
            worker.close()  # as the loop does: whoever waits for this rank sees it go
            return type(error).__name__, time.monotonic() - started
        return "ran", 0.0

    answers = run_ranks(4, seconds_until_error)
    assert [name for name, _ in answers] == [
        "ExchangeError",
        "ExchangeError",
        "StepRefusedError",
        "ExchangeError",
    ]
    assert max(seconds for _, seconds in answers) < 10.0
