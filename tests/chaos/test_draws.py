"""Which disturbances come, and that each comes when it should."""

import random
from collections import Counter
from math import inf

from tests.chaos.disturbances import KINDS
from tests.chaos.draws import drawn_kinds, outcomes_of
from tests.chaos.outcomes import MAX_TRIES, Aim, Outcome


class Disturber:
    """Misses the moment of a kind so many times as that says; notes every draw."""

    def __init__(self) -> None:
        self.draws: list[float] = []
        self._misses: Counter[int] = Counter()

    def __call__(self, num_misses: int, draw: random.Random) -> Outcome:
        self.draws.append(draw.random())
        self._misses[num_misses] += 1
        aim = Aim.HIT if self._misses[num_misses] > num_misses else Aim.MISSED
        return Outcome(str(num_misses), 1, 1, 0, (), 0.0, (), 0, 0, aim)


def test_forty_disturbances_are_of_all_kinds_and_of_none_much_more_often() -> None:
    drawn = drawn_kinds(2, 40, KINDS)
    assert drawn == drawn_kinds(2, 40, KINDS) != drawn_kinds(3, 40, KINDS)
    assert {drawn.count(kind) for kind in KINDS} == {2, 3}


def test_what_misses_its_moment_is_drawn_again_until_it_hits() -> None:
    disturb = Disturber()
    outcomes = list(outcomes_of([0, 2, 1], disturb, seed=1, seconds=inf))
    told = [(outcome.name, outcome.aim) for outcome in outcomes]
    hit, missed = Aim.HIT, Aim.MISSED
    assert told == [("0", hit), ("2", missed), ("2", missed), ("2", hit), ("1", missed), ("1", hit)]
    assert len(set(disturb.draws)) == len(disturb.draws)


def test_what_never_hits_is_given_up_and_the_next_has_its_turn() -> None:
    outcomes = list(outcomes_of([MAX_TRIES, 0], Disturber(), seed=1, seconds=inf))
    assert [outcome.aim for outcome in outcomes] == [
        *[Aim.MISSED] * (MAX_TRIES - 1),
        Aim.GIVEN_UP,
        Aim.HIT,
    ]


def test_none_begins_when_the_time_is_over() -> None:
    assert list(outcomes_of([0], Disturber(), seed=1, seconds=0.0)) == []
