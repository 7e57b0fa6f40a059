"""Scores as columns and as the store keeps them."""

import numpy as np
import pytest

from cluster import worker_messages as m
from cluster.scores import SCORE_BYTES, ScoreColumns, TokenScores
from cluster.wire import Decoder, encode


def make_columns() -> ScoreColumns:
    return ScoreColumns(
        np.array([-1.0, -2.0, -3.0], np.float32),
        np.array([7, 8, 9], np.int32),
        np.array([1, 3, 2], np.int32),
        np.array([10, 20, 21, 22, 30, 31], np.int32),
        -np.arange(6, dtype=np.float32),
    )


def test_a_score_takes_sixteen_bytes() -> None:
    assert SCORE_BYTES == 16
    assert TokenScores.unknown(5).rows.nbytes == 80


def test_columns_are_cut_with_their_alternatives() -> None:
    columns = make_columns()
    assert columns.slice(1, 3).top_ids.tolist() == [20, 21, 22, 30, 31]
    assert columns.alternatives(2) == [(30, -4.0), (31, -5.0)]
    parts = columns.split()
    assert [part.top_ids.tolist() for part in parts] == [[10], [20, 21, 22], [30, 31]]
    assert [part.chosen_logprobs.tolist() for part in parts] == [[-1.0], [-2.0], [-3.0]]
    assert [part.chosen_ranks.tolist() for part in parts] == [[7], [8], [9]]
    assert ScoreColumns.empty().split() == []


def test_the_store_keeps_the_chosen_and_the_first_alternative() -> None:
    stored = make_columns().stored()
    assert stored.known.all()
    assert stored.rows["top_id"].tolist() == [10, 20, 30]
    assert stored.columns().chosen_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert stored.columns().chosen_ranks.tolist() == [7, 8, 9]
    assert stored.columns().top_logprobs.tolist() == [0.0, -1.0, -4.0]


def test_further_alternatives_are_kept_as_far_as_they_are_asked_and_there() -> None:
    columns = make_columns()
    assert [columns.stored(n).num_further for n in (1, 2, 5)] == [0, 1, 4]
    stored = columns.stored(3)
    assert stored.further["token_id"].tolist() == [[-1, -1], [21, 22], [31, -1]]
    assert stored.further["logprob"][1:, 0].tolist() == [-2.0, -5.0]
    assert stored.num_listed.tolist() == [1, 3, 2]
    assert [stored.lists(n).tolist() for n in (1, 2, 3, 4)] == [
        [True, True, True],
        [False, True, True],
        [False, True, False],
        [False, False, False],
    ]
    assert TokenScores.unknown(2, 3).num_listed.tolist() == [0, 0]


@pytest.mark.parametrize("num_listed", [1, 2, 3])
def test_columns_come_back_with_so_many_alternatives_as_are_asked(num_listed: int) -> None:
    columns = make_columns().slice(1, 2)
    back = columns.stored(3).columns(num_listed)
    assert back.alternatives(0) == columns.alternatives(0)[:num_listed]
    assert back.top_lens.tolist() == [num_listed]


def test_a_token_is_taken_as_a_whole_by_who_lists_more_and_only_then() -> None:
    scores = TokenScores.unknown(3, 1)
    assert scores.fill(0, make_columns().stored()) == 3
    other = make_columns().stored(3)
    other.rows["chosen_logprob"] = [-7.0, -8.0, -9.0]
    assert scores.fill(0, other) == 2
    assert scores.rows["chosen_logprob"].tolist() == [-1.0, -8.0, -9.0]
    assert scores.further["token_id"].tolist() == [[-1], [21], [31]]
    assert scores.fill(0, other) == 0
    assert TokenScores.unknown(3).fill(0, other) == 3


def test_what_is_known_is_filled_in_and_never_changed() -> None:
    scores = TokenScores.unknown(5)
    assert not scores.known.any()
    assert scores.fill(1, make_columns().stored()) == 3
    later = make_columns().stored()
    later.rows["chosen_logprob"] = -9.0
    assert scores.fill(0, later) == 1
    assert scores.rows["chosen_logprob"][:4].tolist() == [-9.0, -1.0, -2.0, -3.0]
    assert scores.known.tolist() == [True, True, True, True, False]


def test_a_score_frame_survives_the_wire() -> None:
    ints = np.array([4], np.int32)
    frame = m.ScoreFrame(1, 2, ints, np.array([3], np.int32), make_columns())
    received = Decoder(m.LateFrame).decode(encode(frame))
    assert isinstance(received, m.ScoreFrame)
    assert received.scores.alternatives(1) == make_columns().alternatives(1)
