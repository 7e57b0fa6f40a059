"""Scores of blocks as bytes: cut at the ends of blocks, merged, never changed."""

import numpy as np
import pytest

from cluster.scores import ALTERNATIVE_BYTES, SCORE_BYTES, TokenScores, no_alternatives
from prefix_store.packed_scores import ScoreOffer, unknown_scores, unpack

B = 4


def made(first: int, end: int) -> TokenScores:
    scores = TokenScores.unknown(end - first)
    scores.rows["chosen_logprob"] = -np.arange(first, end)
    return scores


def chosen(packed: bytes) -> list[float]:
    """NaN as 1.0"""
    values: list[float] = np.nan_to_num(unpack(packed).rows["chosen_logprob"], nan=1.0).tolist()
    return values


@pytest.mark.parametrize(
    ("start", "end", "blocks"), [(0, 8, [0, 1]), (3, 9, [0, 1, 2]), (5, 7, [1]), (6, 6, [])]
)
def test_an_offer_has_the_blocks_that_its_tokens_lie_in(
    start: int, end: int, blocks: list[int]
) -> None:
    offer = ScoreOffer(start, made(start, end), B)
    assert offer.blocks_between(0, 100) == blocks
    assert offer.num_known(blocks) == end - start


def test_a_block_of_an_offer_has_its_tokens_in_their_places() -> None:
    offer = ScoreOffer(3, made(3, 9), B)
    assert list(map(chosen, offer.packed(range(3)))) == [
        [1.0, 1.0, 1.0, -3.0],
        [-4.0, -5.0, -6.0, -7.0],
        [-8.0, 1.0, 1.0, 1.0],
    ]
    assert all(len(packed) == B * SCORE_BYTES for packed in offer.packed(range(3)))


def test_a_block_of_which_no_token_has_a_score_is_left_out() -> None:
    scores = made(0, 12)
    scores.rows["chosen_logprob"][4:8] = np.nan
    assert ScoreOffer(0, scores, B).blocks_between(0, 3) == [0, 2]
    assert ScoreOffer(0, scores, B).blocks_between(1, 2) == []


def test_a_block_of_an_offer_has_the_alternatives_of_its_tokens_in_their_places() -> None:
    scores = made(3, 9)
    further = no_alternatives(6, 2)
    further["token_id"] = np.arange(12).reshape(6, 2)
    offer = ScoreOffer(3, TokenScores(scores.rows, further), B)
    assert offer.block_bytes == B * (SCORE_BYTES + 2 * ALTERNATIVE_BYTES)
    nobody = [-1, -1]
    listed = [[nobody, nobody, nobody, [0, 1]], [[2, 3], [4, 5], [6, 7], [8, 9]]]
    for block, expected in enumerate(listed):
        packed, more = offer.packed([block]), offer.further([block])
        assert len(packed[0]) + len(more[0]) == offer.block_bytes
        for found in (unpack(*packed, *more), offer.scores_of(block)):
            assert found.further["token_id"].tolist() == expected
            assert found.known.tolist() == [ids != nobody for ids in expected]


def test_later_writes_to_offered_scores_change_nothing() -> None:
    scores = made(0, 4)
    offer = ScoreOffer(0, scores, B)
    scores.rows["chosen_logprob"] = 5
    assert chosen(*offer.packed([0])) == [0.0, -1.0, -2.0, -3.0]


def test_unknown_scores_have_no_token() -> None:
    assert not unpack(unknown_scores(B)).known.any()
