"""The scores of one request: what is missing, what the store was given, what is listed."""

import numpy as np
import pytest

from cluster.scores import ScoreColumns, TokenScores
from router_service.score_log import ScoreLog


def columns(start: int, end: int, num_listed: int = 1) -> ScoreColumns:
    """Of tokens [start, end): a function of the position."""
    positions = np.arange(start, end)
    return ScoreColumns(
        -positions.astype(np.float32),
        positions.astype(np.int32) + 1,
        np.full(len(positions), num_listed, np.int32),
        np.repeat(positions, num_listed).astype(np.int32),
        -np.repeat(positions, num_listed).astype(np.float32),
    )


def stored(num_tokens: int, known: list[int], num_listed: int = 1) -> TokenScores:
    scores = TokenScores.unknown(num_tokens, num_listed - 1)
    for position in known:
        scores.fill(position, columns(position, position + 1, num_listed).stored(num_listed))
    return scores


def make_log(num_prompt_tokens: int = 20, *, num_listed: int = 1, asked: bool = True) -> ScoreLog:
    return ScoreLog(num_prompt_tokens, scores_prompt=asked, num_alternatives=num_listed)


def listed(log: ScoreLog) -> list[float]:
    values: list[float] = log.prompt_columns().chosen_logprobs.tolist()
    return values


def test_the_first_missing_score_decides_where_the_pass_begins() -> None:
    log = make_log()
    assert (log.num_scored_prompt_tokens, log.is_complete) == (1, False)
    log.begin(16, stored(16, [1, 2, 3, 5, 6]))
    assert log.num_scored_prompt_tokens == 4
    assert log.num_to_score(3, 20) == 16
    log.add_prompt(4, columns(4, 20))
    assert log.is_complete
    assert listed(log) == [-float(position) for position in range(1, 20)]


def test_a_prompt_of_one_token_has_no_score_to_wait_for() -> None:
    log = make_log(1)
    assert log.is_complete
    assert log.prompt_columns().num_tokens == 0


@pytest.mark.parametrize("num_listed", [1, 3])
@pytest.mark.parametrize("again_from", [0, 5, 8, 9])
def test_tokens_that_are_scored_again_after_a_preemption_are_listed_once(
    num_listed: int, again_from: int
) -> None:
    log = make_log(num_listed=num_listed)
    log.add_prompt(1, columns(1, 10, num_listed))
    assert log.num_scored_prompt_tokens == 10
    log.begin(0, stored(0, []))
    assert log.num_to_score(again_from, 20) == 19 - again_from
    log.add_prompt(again_from + 1, columns(again_from + 1, 20, num_listed))
    assert listed(log) == [-float(position) for position in range(1, 20)]
    assert log.prompt_columns().top_lens.tolist() == [num_listed] * 19


def test_fewer_alternatives_than_are_asked_are_as_good_as_none() -> None:
    log = make_log(num_listed=2)
    log.begin(16, stored(16, list(range(1, 16))))
    assert log.num_scored_prompt_tokens == 1
    assert log.num_stored == 1
    assert log.num_to_score(0, 20) == 19


def test_as_many_alternatives_as_are_asked_are_taken_up_to_where_they_end() -> None:
    log = make_log(num_listed=3)
    known = stored(16, list(range(1, 16)), num_listed=3)
    known.further["token_id"][9, 1] = -1
    log.begin(16, known)
    assert (log.num_scored_prompt_tokens, log.num_stored) == (9, 9)
    log.add_prompt(9, columns(9, 20, 3))
    assert log.prompt_columns().top_ids.tolist() == np.repeat(np.arange(1, 20), 3).tolist()
    assert log.slice(9, 20).lists(3).all()


def test_what_lists_more_than_the_store_has_is_given_to_it() -> None:
    log = make_log(8, num_listed=2)
    log.add_prompt(1, columns(1, 8, 2))
    for position in range(8, 14):
        log.add_output(position, columns(position, position + 1, 5))
    assert log.slice(1, 14).lists(2).all()
    known = stored(12, list(range(1, 12)), num_listed=2)
    known.further["token_id"][10] = -1
    log.begin(12, known)
    assert log.num_stored == 10


def test_who_asks_nothing_of_the_prompt_keeps_one_alternative() -> None:
    log = ScoreLog(8, scores_prompt=False, num_alternatives=5)
    log.add_output(8, columns(8, 9, 5))
    assert log.slice(8, 9).num_further == 0


def test_what_it_has_and_the_store_lost_or_never_got_is_given_again() -> None:
    log = make_log(8, asked=False)
    for position in range(8, 14):
        log.add_output(position, columns(position, position + 1))
    log.begin(12, stored(12, [8, 9]))
    assert log.num_stored == 10
    log.begin(12, stored(12, [8, 9, 10, 11]))
    assert log.num_stored == 12
    log.begin(12, None)
    assert log.num_stored == 12


def test_memory_comes_with_the_scores_and_what_is_known_stays() -> None:
    log = make_log(8, asked=False)
    for position in range(8, 400):
        log.add_output(position, columns(position, position + 1))
    part = log.slice(5, 300)
    assert part.known.tolist() == [False] * 3 + [True] * 292
    assert part.rows["chosen_logprob"][3] == -8
