"""Which kinds of disturbance come in which order, and each until it comes when it should."""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tests.chaos.outcomes import MAX_TRIES, Aim, Outcome

Kind = TypeVar("Kind")


def drawn_kinds(seed: int, number: int, among: Sequence[Kind]) -> list[Kind]:
    """Every kind as often as the others, or once more, in a drawn order."""
    drawn = [among[n % len(among)] for n in range(number)]
    random.Random(seed).shuffle(drawn)
    return drawn


def outcomes_of(
    kinds: Sequence[Kind],
    disturb: Callable[[Kind, random.Random], Outcome],
    *,
    seed: int,
    seconds: float,
) -> Iterator[Outcome]:
    """Of each in its turn, and of those that missed their moment and were drawn again, MAX_TRIES times at most. None
    begins after `seconds`."""
    end = time.monotonic() + seconds
    for number, kind in enumerate(kinds):
        for attempt in range(1, MAX_TRIES + 1):
            if time.monotonic() >= end:
                return
            outcome = disturb(kind, random.Random(f"{seed} {number} {attempt}"))
            if outcome.aim is Aim.MISSED and attempt == MAX_TRIES:
                outcome = replace(outcome, aim=Aim.GIVEN_UP)
            print(f"{number + 1}: {outcome}", file=sys.stderr, flush=True)
            yield outcome
            if outcome.aim is Aim.HIT:
                break
