"""Which plan parts a rank takes, which steps it can plan with them, and what it refuses before any exchange."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from cluster.worker_messages import PlanPart
from expert_workers.dispatch.planned import PlannedStep
from expert_workers.inputs_from_step import PlannedChunk, StepRefusedError
from expert_workers.plan_cache import PlanCache
from tests.expert_workers.dispatch.plan_cases import even_case, plan_part, plan_shape

CASE = even_case(4, [[3, 5], [2]])
"""Two ranks; fragments 0 and 1 are of source 0, fragment 2 of source 1."""
FRAGMENTS = [fragment for of_source in CASE.fragments() for fragment in of_source]
LAYERS, RANKS = CASE.shape.num_moe_layers, CASE.ep_size


def make_part(fragment_id: int, rank: int = 0) -> PlanPart:
    return plan_part(FRAGMENTS[fragment_id], fragment_id, rank)


def make_cache(rank: int = 0, fragment_ids: tuple[int, ...] = (0, 1, 2)) -> PlanCache:
    cache = PlanCache(plan_shape(CASE, rank), None)
    for fragment_id in fragment_ids:
        cache.add(make_part(fragment_id, rank))
    return cache


def plan(cache: PlanCache, *chunks: PlannedChunk) -> PlannedStep:
    step = cache.plan_step(9, chunks, has_dynamic=True)
    assert step is not None
    return step


BOTH = PlannedChunk(seq_id=70, source=0, num_tokens=8, fragment_ids=(0, 1))
FIRST = PlannedChunk(seq_id=71, source=0, num_tokens=3, fragment_ids=(0,))
OTHER = PlannedChunk(seq_id=72, source=1, num_tokens=2, fragment_ids=(2,))


def test_a_step_is_planned_from_the_fragments_it_names() -> None:
    for rank, num_tokens in ((0, 8), (1, 2)):
        step = plan(make_cache(rank), BOTH, OTHER)
        assert (step.num_tokens, step.has_dynamic) == (num_tokens, True)
        assert step.expert_load.shape == (LAYERS, CASE.placement.num_physical_per_rank)
        assert step.expert_load.dtype == np.int32


def test_a_step_without_planned_chunks_has_no_plan() -> None:
    assert make_cache().plan_step(9, [], has_dynamic=True) is None


def test_chunks_of_other_ranks_alone_give_a_rank_rows_but_no_tokens() -> None:
    step = plan(make_cache(rank=1), BOTH)
    assert step.num_tokens == 0
    assert step.expert_load.sum() > 0


def test_a_fragment_may_be_named_by_several_chunks_of_a_step() -> None:
    once, twice = plan(make_cache(), FIRST), plan(make_cache(), FIRST, replace(FIRST, seq_id=8))
    assert twice.num_tokens == 2 * once.num_tokens
    np.testing.assert_array_equal(twice.expert_load, 2 * once.expert_load)


def test_an_evicted_fragment_is_refused_and_can_come_again() -> None:
    cache = make_cache()
    cache.evict([1, 12345])
    assert len(cache) == 2
    with pytest.raises(StepRefusedError, match="step 9 names plan fragment 1, which rank 0 does"):
        plan(cache, BOTH)
    plan(cache, FIRST, OTHER)
    cache.add(make_part(1))
    plan(cache, BOTH, OTHER)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (replace(BOTH, fragment_ids=(0, 3)), r"names plan fragment 3, which rank \d does not hold"),
        (replace(BOTH, source=1), r"uses plan fragment 0 on rank 1, it was compiled for rank 0"),
        (replace(BOTH, num_tokens=7), r"fragments \[0, 1\] of seq 70 cover 8 .* chunk has 7"),
        (replace(BOTH, fragment_ids=(0,)), r"cover 3 tokens, its chunk has 8"),
    ],
)
def test_every_rank_refuses_a_chunk_that_its_fragments_do_not_plan(
    chunk: PlannedChunk, reason: str, rank: int
) -> None:
    with pytest.raises(StepRefusedError, match=reason):
        plan(make_cache(rank), chunk)


def test_tokens_that_match_in_sum_only_are_refused() -> None:
    short, long = replace(FIRST, num_tokens=5), replace(FIRST, num_tokens=3, fragment_ids=(1,))
    with pytest.raises(StepRefusedError, match="cover 3 tokens, its chunk has 5"):
        plan(make_cache(), short, long)


def with_receive(part: PlanPart, **changes: Any) -> PlanPart:
    return msgspec.structs.replace(part, receive=replace(part.receive, **changes))


def with_send(part: PlanPart, **changes: Any) -> PlanPart:
    assert part.send is not None
    return msgspec.structs.replace(part, send=replace(part.send, **changes))


GOOD = make_part(1)
GOOD_SEND = FRAGMENTS[1].send
NUM_PAIRS = len(GOOD.receive.pair_rows)
DESTINATIONS = GOOD.receive.destinations


def raised(array: np.ndarray, by: int) -> np.ndarray:
    """The last entry of the array."""
    changed = array.copy()
    changed.flat[-1] += by
    return changed


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (msgspec.structs.replace(GOOD, placement_epoch=3), "placement epoch 3, expected 0"),
        (msgspec.structs.replace(GOOD, send=None), "a send part False, expected True"),
        (msgspec.structs.replace(GOOD, source=1), "a send part True, expected False"),
        (msgspec.structs.replace(make_part(2), source=2), "a source among the ranks False"),
        (msgspec.structs.replace(GOOD, num_tokens=4), "num_rows out of range"),
        (with_receive(GOOD, num_rows=GOOD.receive.num_rows[:1]), "shape of num_rows"),
        (with_receive(GOOD, num_rows=raised(GOOD.receive.num_rows, -1)), "out of range"),
        (with_receive(GOOD, pair_counts=GOOD.receive.pair_counts[:, :-1]), "shape of pair_counts"),
        (with_receive(GOOD, pair_counts=raised(GOOD.receive.pair_counts, 1)), "shape of pair_rows"),
        (with_receive(GOOD, pair_counts=-GOOD.receive.pair_counts), "pair_counts out of range"),
        (with_receive(GOOD, pair_rows=GOOD.receive.pair_rows[:-1]), "shape of pair_rows"),
        (with_receive(GOOD, pair_rows=raised(GOOD.receive.pair_rows, 5)), "pair_rows out of range"),
        (with_receive(GOOD, pair_rows=-1 - GOOD.receive.pair_rows), "pair_rows out of range"),
        (with_receive(GOOD, pair_ranks=np.full(NUM_PAIRS, 3, np.uint8)), "pair_ranks out of"),
        (with_receive(GOOD, pair_ranks=np.zeros(NUM_PAIRS)), "integers as pair_ranks False"),
        (with_receive(GOOD, pair_weights=np.zeros(1, np.float32)), "shape of pair_weights"),
        (with_receive(GOOD, pair_weights=np.zeros(NUM_PAIRS)), "dtype of pair_weights float64"),
        (with_receive(GOOD, pair_rows=np.zeros(NUM_PAIRS, np.int32)), "pair_rows that do not asc"),
        (
            with_receive(GOOD, destinations=DESTINATIONS ^ np.uint8(1 << 7)),
            "itself as a destination",
        ),
        (with_receive(GOOD, destinations=DESTINATIONS ^ np.uint8(1 << 6)), r"destinations \[\["),
        (with_receive(GOOD, destinations=DESTINATIONS[:1]), "shape of destinations"),
        (with_receive(GOOD, destinations=DESTINATIONS.view(np.int8)), "dtype of destinations"),
        (with_send(GOOD, counts=np.zeros((LAYERS, RANKS + 1), np.int32)), "shape of send counts"),
        (with_send(GOOD, tokens=GOOD_SEND.tokens[1:]), "shape of send tokens"),
        (with_send(GOOD, tokens=raised(GOOD_SEND.tokens, 5)), "send tokens out of range"),
        (with_send(GOOD, tokens=np.zeros_like(GOOD_SEND.tokens)), "send tokens that do not ascend"),
        (with_send(GOOD, counts=GOOD_SEND.counts[:, ::-1]), "rows kept at home"),
    ],
)
def test_a_part_of_another_shape_or_at_odds_with_itself_is_not_taken(
    part: PlanPart, reason: str
) -> None:
    cache = make_cache(fragment_ids=())
    with pytest.raises(StepRefusedError, match=reason):
        cache.add(part)
    assert len(cache) == 0


def test_a_part_under_an_id_that_another_fragment_has_here_is_not_taken() -> None:
    cache = make_cache()
    cache.add(make_part(0))
    with pytest.raises(StepRefusedError, match="plan fragment 0 of rank 0 has digest"):
        cache.add(msgspec.structs.replace(make_part(1), fragment_id=0))
    plan(cache, BOTH)
    cache.evict([0])
    cache.add(msgspec.structs.replace(make_part(1), fragment_id=0))
    assert len(cache) == 3
