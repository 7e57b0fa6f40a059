"""Fragments: who sends which tokens where, and what each rank does with the rows it gets.

Letters: T tokens, L MoE layers, K experts per token.
"""

import numpy as np
import pytest

from cluster.dispatch_plan import PlanFragment
from cluster.errors import PlanError
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes, expert_id_dtype
from cluster.types import Rank
from prefix_store.plan_compiler import compile_fragment

TWO_RANKS = ExpertPlacement.contiguous(num_experts=6, ep_size=2)
TWO_RANKS_OF_8 = ExpertPlacement.contiguous(num_experts=8, ep_size=2)


def make_routes(ids: list[list[list[int]]], num_experts: int = 6) -> ExpertRoutes:
    """ids: [T, L, K]. The weight of an expert is its id and a half."""
    array = np.array(ids, expert_id_dtype(num_experts))
    return ExpertRoutes(array, array.astype(np.float32) + 0.5)


def random_routes(num_tokens: int, num_experts: int, k: int) -> ExpertRoutes:
    generator = np.random.default_rng(num_experts + k)
    order = generator.random((num_tokens, 3, num_experts)).argsort(axis=-1)
    ids = np.sort(order[..., :k], axis=-1).astype(expert_id_dtype(num_experts))
    return ExpertRoutes(ids, generator.random(ids.shape, dtype=np.float32))


def compile_at_start(
    routes: ExpertRoutes, source: Rank, placement: ExpertPlacement = TWO_RANKS
) -> PlanFragment:
    """Of the first tokens of a sequence."""
    return compile_fragment(routes, source, placement, first_position=0)


def test_a_token_goes_once_to_every_rank_that_has_one_of_its_experts() -> None:
    routes = make_routes([[[0, 2], [1, 4]], [[3, 5], [0, 1]], [[2, 3], [3, 4]]])
    send = compile_at_start(routes, Rank(1)).send
    assert send.counts.tolist() == [[2, 2], [2, 2]]
    assert send.tokens.tolist() == [0, 2, 1, 2, 0, 1, 0, 2]


def test_every_part_tells_in_bits_where_its_source_sends_rows() -> None:
    routes = make_routes([[[0, 1], [4, 5]], [[1, 2], [2, 3]]])
    for part in compile_at_start(routes, Rank(0)).receive:
        assert part.destinations.tolist() == [[0b1000_0000], [0b1100_0000]]


def test_a_rank_is_told_of_its_own_pairs_by_expert_and_then_by_row() -> None:
    routes = make_routes([[[0, 2], [1, 4]], [[3, 5], [0, 1]], [[2, 3], [3, 4]]])
    first, second = compile_at_start(routes, Rank(1)).receive
    assert (first.num_rows.tolist(), second.num_rows.tolist()) == ([2, 2], [2, 2])
    assert first.pair_counts.tolist() == [[1, 0, 2], [1, 2, 0]]
    assert first.pair_rows.tolist() == [0, 0, 1, 1, 0, 1]
    assert first.pair_ranks.tolist() == [0, 1, 0, 0, 0, 1]
    assert first.pair_weights.tolist() == [0.5, 2.5, 2.5, 0.5, 1.5, 1.5]
    assert second.pair_counts.tolist() == [[2, 0, 1], [1, 2, 0]]
    assert second.pair_rows.tolist() == [0, 1, 0, 1, 0, 1]
    assert second.pair_weights.tolist() == [3.5, 3.5, 5.5, 3.5, 4.5, 4.5]


COPIES_OF_2 = ExpertPlacement(7, 2, 3, np.array([2, 0, 1, 2], np.int32))
"""Expert 2 has one copy on either rank: the first serves it at even positions."""


def test_local_order_is_the_placements_and_copies_take_turns_by_position() -> None:
    routes = make_routes([[[0, 2]], [[1, 2]]], 3)
    fragment = compile_fragment(routes, Rank(0), COPIES_OF_2, first_position=6)
    first, second = fragment.receive
    assert fragment.placement_epoch == 7
    assert first.pair_counts.tolist() == [[1, 1]]
    assert first.pair_rows.tolist() == [0, 0]
    assert first.pair_ranks.tolist() == [0, 1]
    assert first.pair_weights.tolist() == [2.5, 0.5]
    assert second.pair_counts.tolist() == [[1, 1]]
    assert second.pair_rows.tolist() == [0, 0]


@pytest.mark.parametrize(("first_position", "rows"), [(0, [2, 1]), (1, [1, 2]), (6, [2, 1])])
def test_the_position_of_the_first_token_counts_modulo_the_period(
    first_position: int, rows: list[int]
) -> None:
    routes = make_routes([[[2]], [[2]], [[2]]], 3)
    fragment = compile_fragment(routes, Rank(0), COPIES_OF_2, first_position=first_position)
    assert COPIES_OF_2.position_period == 2
    assert fragment.send.counts.tolist() == [rows]


def test_a_fragment_of_no_tokens_has_all_counts_and_no_entries() -> None:
    fragment = compile_at_start(make_routes([[[0, 1]]]).slice(0, 0), Rank(0))
    assert fragment.num_tokens == 0
    assert fragment.send.counts.tolist() == [[0, 0]]
    assert [part.pair_counts.tolist() for part in fragment.receive] == [[[0, 0, 0]]] * 2
    assert [len(part.pair_rows) for part in fragment.receive] == [0, 0]


@pytest.mark.parametrize(("num_experts", "k"), [(8, 1), (64, 8), (256, 4), (512, 8)])
def test_every_choice_is_one_pair_with_its_weight_and_every_array_has_its_dtype(
    num_experts: int, k: int
) -> None:
    routes = random_routes(20, num_experts, k)
    fragment = compile_at_start(routes, Rank(2), ExpertPlacement.contiguous(num_experts, 4))
    weights = np.concatenate([part.pair_weights for part in fragment.receive])
    np.testing.assert_array_equal(np.sort(weights), np.sort(routes.topk_weights.ravel()))
    assert (fragment.send.tokens.dtype, fragment.send.counts.dtype) == (np.int32, np.int32)
    for rank, part in enumerate(fragment.receive):
        np.testing.assert_array_equal(part.num_rows, fragment.send.counts[:, rank])
        assert [a.dtype for a in (part.num_rows, part.pair_counts, part.pair_rows)] == [
            np.int32
        ] * 3
        assert (part.pair_ranks.dtype, part.pair_weights.dtype) == (np.uint8, np.float32)


def test_the_bytes_of_a_fragment_are_those_of_all_its_arrays() -> None:
    fragment = compile_at_start(random_routes(5, 8, 2), Rank(0), TWO_RANKS_OF_8)
    arrays = [fragment.send.tokens, fragment.send.counts]
    for part in fragment.receive:
        arrays += [part.num_rows, part.pair_counts]
        arrays += [part.pair_rows, part.pair_ranks, part.pair_weights, part.destinations]
    assert fragment.num_bytes == sum(array.nbytes for array in arrays)


def test_no_array_of_a_part_keeps_a_larger_one_alive() -> None:
    fragment: PlanFragment = compile_at_start(random_routes(5, 8, 2), Rank(0), TWO_RANKS_OF_8)
    for part in fragment.receive:
        assert [a.base for a in (part.num_rows, part.pair_rows, part.pair_ranks)] == [None] * 3
        assert part.pair_weights.base is None


def test_an_expert_that_the_placement_does_not_have_is_an_error_that_names_it() -> None:
    routes = make_routes([[[0, 1]], [[2, 6]]])
    with pytest.raises(
        PlanError, match=r"2 tokens name expert 6, the placement has experts 0 to 5"
    ):
        compile_at_start(routes, Rank(0))


def test_a_fragment_is_named_by_all_that_it_is_compiled_from() -> None:
    routes, others = (random_routes(5, 8, k) for k in (2, 3))
    weights = routes.topk_weights.copy()
    weights[-1, -1, -1] += np.float32(0.5)
    digests = {
        compile_at_start(routes, Rank(0), TWO_RANKS_OF_8).digest,
        compile_at_start(routes, Rank(1), TWO_RANKS_OF_8).digest,
        compile_at_start(routes.slice(0, 4), Rank(0), TWO_RANKS_OF_8).digest,
        compile_at_start(others, Rank(0), TWO_RANKS_OF_8).digest,
        compile_at_start(ExpertRoutes(routes.topk_ids, weights), Rank(0), TWO_RANKS_OF_8).digest,
    }
    assert len(digests) == 5


def test_the_position_of_the_first_token_is_part_of_the_name_modulo_the_period() -> None:
    routes = make_routes([[[2]]], 3)
    digests = [
        compile_fragment(routes, Rank(0), COPIES_OF_2, first_position=first).digest
        for first in range(4)
    ]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


@pytest.mark.parametrize("k", [1, 3, 8])
def test_parts_of_a_compiled_fragment_agree(k: int) -> None:
    placement = ExpertPlacement.contiguous(64, 16)
    assert compile_at_start(random_routes(20, 64, k), Rank(3), placement).parts_agree
