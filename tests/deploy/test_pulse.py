"""A process is asked for signs of life, on a clock that the test moves."""

from typing import Any

import pytest

from deploy.pulse import HANG_SECONDS, MIN_LOOKS, PULSE_SECONDS, Pulse


class Patient:
    """Answers as it is told to; a call is its number."""

    def __init__(self) -> None:
        self.now, self.num_asked = 0.0, 0
        self.answer: tuple[bool, Any] = (False, None)
        self.pulse = Pulse(self._ask, lambda _: self.answer, clock=lambda: self.now)

    def _ask(self) -> int:
        self.num_asked += 1
        return self.num_asked

    def look(self, seconds: float) -> bool:
        self.now += seconds
        return self.pulse.hangs()


@pytest.mark.parametrize("answer", [(True, True), (False, "its process died")])
def test_one_that_answers_is_asked_again_and_again_and_one_that_died_does_not_hang(
    answer: tuple[bool, Any],
) -> None:
    patient = Patient()
    patient.answer = answer
    assert not any(patient.look(1.0) for _ in range(100))
    assert 10 < patient.num_asked <= 100 / PULSE_SECONDS


def test_one_that_is_silent_for_long_enough_hangs() -> None:
    patient = Patient()
    patient.look(PULSE_SECONDS)
    assert not any(patient.look(1.0) for _ in range(int(HANG_SECONDS) - 1))
    assert patient.look(1.0)
    assert patient.num_asked == 1


def test_whoever_looks_after_a_long_time_himself_looks_again_before_he_says_so() -> None:
    patient = Patient()
    patient.look(PULSE_SECONDS)
    assert [patient.look(100.0)] + [patient.look(0.1) for _ in range(MIN_LOOKS - 1)] == [
        *([False] * (MIN_LOOKS - 1)),
        True,
    ]
    patient.pulse.begin()
    assert not patient.look(0.0)
