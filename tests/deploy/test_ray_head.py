"""A head of Ray that is away, for a while or for good: what is said, and when the cell has to end. Answers and time are
the test's."""

import pytest

from cluster.config import ClusterSection
from deploy.ray_head import (
    DEAF_SECONDS,
    LOOK_SECONDS,
    RESTART_SECONDS,
    SILENCE_SECONDS,
    TELL_SECONDS,
    RayHead,
)

LIMIT_SECONDS = 30.0


class Watched:
    """A head that answers unless `is_silent`, looked at every LOOK_SECONDS."""

    def __init__(self, address: str = "auto") -> None:
        self.now, self.is_silent = 100.0, False
        self.questions = self.times_away = 0
        self.starts: list[float] = []
        self.can_start = False
        self.head = RayHead(
            ClusterSection(address=address, head_timeout_seconds=LIMIT_SECONDS),
            ask=self._ask,
            start_again=self._start,
            on_away=self._away,
            clock=lambda: self.now,
        )

    def looks(self, seconds: float) -> list[str]:
        """What was returned meanwhile, up to the first reason to end."""
        until = self.now + seconds
        while self.now < until:
            self.now += LOOK_SECONDS
            if (failure := self.head.look()) is not None:
                return [failure]
        return []

    def _ask(self, seconds: float) -> bool:
        self.questions += 1
        if self.is_silent:
            self.now += seconds
        return not self.is_silent

    def _start(self) -> bool:
        if self.can_start:
            self.starts.append(self.now)
        return self.can_start

    def _away(self) -> None:
        self.times_away += 1


def test_a_head_that_is_back_in_time_is_told_of_twice_and_ends_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watched = Watched()
    watched.is_silent = True
    assert watched.looks(LIMIT_SECONDS / 2) == []
    assert watched.head.is_away
    assert watched.times_away == 1
    watched.is_silent = False
    assert watched.looks(3 * SILENCE_SECONDS) == []
    assert not watched.head.is_away
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines if line.startswith("pointsman: ")] == [
        "warning: Ray's head does not answer: requests go on, but no process that is lost is replaced before "
        "it is back; the cell ends if it is not within 30 s",
        "warning: lines of the cell's other processes are in Ray's logs from now on",
        "warning: Ray's head answers again: what was lost meanwhile is replaced",
    ]


def test_a_head_that_is_slow_for_a_moment_is_not_worth_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watched = Watched()
    watched.is_silent = True
    watched.looks(TELL_SECONDS - LOOK_SECONDS)
    watched.is_silent = False
    assert watched.looks(LIMIT_SECONDS) == []
    assert capsys.readouterr().err == ""
    assert watched.times_away == 0


def test_absences_do_not_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    watched = Watched()
    for _ in range(3):
        watched.is_silent = True
        assert watched.looks(LIMIT_SECONDS - 5) == []
        watched.is_silent = False
        assert watched.looks(3 * SILENCE_SECONDS) == []
    assert capsys.readouterr().err.count("does not answer") == 3
    assert watched.times_away == 1


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        (
            "10.0.0.1:6379",
            "start Ray again, then the cell; a cell goes on if the head comes back in",
        ),
        (
            "",
            "the process gcs_server of this server's own Ray ended or hangs; start the server again",
        ),
    ],
)
def test_a_head_that_stays_away_ends_the_cell_with_what_to_do(address: str, remedy: str) -> None:
    watched = Watched(address)
    watched.is_silent = True
    begun = watched.now
    (failure,) = watched.looks(10 * LIMIT_SECONDS)
    assert LIMIT_SECONDS <= watched.now - begun < LIMIT_SECONDS + 5
    assert "has not answered for 3" in failure
    assert remedy in failure


def test_who_wants_to_start_something_is_answered_as_things_are_now() -> None:
    watched = Watched()
    assert watched.head.answers()
    watched.is_silent = True
    assert not watched.head.answers()


def test_nobody_waits_for_the_same_silence_again_and_again() -> None:
    watched = Watched()
    watched.is_silent = True
    assert [watched.head.answers() for _ in range(20)] == [False] * 20
    assert watched.questions == 1
    watched.is_silent = False
    watched.now += SILENCE_SECONDS
    assert watched.head.answers()


def test_a_head_that_can_be_started_again_is_so_many_times_but_not_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watched = Watched()
    watched.is_silent = watched.can_start = True
    watched.looks(LIMIT_SECONDS - 5)
    assert 2 <= len(watched.starts) <= LIMIT_SECONDS / RESTART_SECONDS
    assert watched.starts[0] - 100.0 >= TELL_SECONDS
    told = [line for line in capsys.readouterr().err.splitlines() if "is started again" in line]
    assert len(told) == len(watched.starts)


def test_a_server_whose_own_ray_has_lost_its_node_ends_at_once_and_says_so() -> None:
    has_node = [True, False]
    head = RayHead(
        ClusterSection(head_timeout_seconds=LIMIT_SECONDS),
        ask=lambda _: True,
        has_node=lambda: has_node.pop(0),
        clock=iter(range(100, 200)).__next__,
    )
    assert head.look() is None
    failure = head.look()
    assert failure is not None
    assert "raylet" in failure
    assert "start the server again" in failure


def test_a_head_that_is_away_for_a_moment_costs_no_lines_of_other_processes() -> None:
    watched = Watched()
    watched.is_silent = True
    watched.looks(TELL_SECONDS + 2.0)
    assert (watched.head.is_away, watched.times_away) == (True, 0)
    watched.looks(DEAF_SECONDS)
    assert watched.times_away == 1
