"""How a run of disturbances is judged and told."""

from dataclasses import replace

import pytest

from tests.chaos.document import with_section
from tests.chaos.outcomes import (
    Aim,
    Observed,
    Outcome,
    is_good,
    num_hits,
    outcome_of,
    table,
    wrong_streams,
)
from tests.chaos.recoveries import RANKS_MEET, RANKS_START, recoveries
from tests.chaos.streams import Stream, longest_pause

WHOLE = Stream([1, 2, 3], is_whole=True)
LOST = ("127.0.0.1", 40_001)
"""Was connected to the HTTP server that was killed."""
OTHER = ("127.0.0.1", 40_002)
ONCE = Outcome("a rank", 32, 31, 1, (), 4.0, (3.0,), 90, 10)
AGAIN = Outcome("a rank", 32, 32, 0, (), 6.0, (2.0, 5.0), 0, 0)


@pytest.mark.parametrize(
    ("end", "is_right"),
    [
        (Stream([1, 2, 3], is_whole=True, client=OTHER), True),
        (Stream([1, 2, 4], is_whole=True, client=OTHER), False),
        (Stream([1, 2], is_whole=True, client=OTHER), False),
        (Stream([1, 2], ["broken"], client=OTHER), False),
        (Stream([], ["broken"], client=None), False),
        (Stream([1, 2, 3], is_whole=True, client=LOST), True),
        (Stream([1, 2, 4], is_whole=True, client=LOST), False),
        (Stream([1, 2], ["broken"], client=LOST), True),
        (Stream([], ["broken"], client=LOST), True),
        (Stream([1, 3], ["broken"], client=LOST), False),
        (Stream([1, 2, 3, 4], ["broken"], client=LOST), False),
        (Stream([1, 2], [], client=LOST), False),
        (Stream([1, 2], ["told", "broken"], client=LOST), False),
    ],
)
def test_a_stream_is_the_undisturbed_one_or_with_the_killed_server_its_beginning_and_one_error(
    end: Stream, is_right: bool
) -> None:
    assert (wrong_streams([end], [WHOLE], {LOST}) == ()) is is_right


def test_where_no_server_was_killed_no_stream_may_be_cut() -> None:
    cut = Stream([1, 2], ["broken"], client=LOST)
    assert wrong_streams([cut, WHOLE], [WHOLE, WHOLE], ()) == (cut,)


def test_the_longest_pause_is_of_all_streams_together_and_begins_with_the_disturbance() -> None:
    streams = [Stream(token_times=[1.0, 2.0, 9.0]), Stream(token_times=[5.0, 9.5])]
    assert longest_pause(streams, since=2.5) == 4.0
    assert longest_pause(streams, since=0.0) == 4.0
    assert longest_pause(streams, since=9.6) == 0.0


TEXTS = {
    "s": f"{RANKS_START} ranks=[1]",
    "m": f"{RANKS_MEET} generation={{}} at=127.0.0.1:1 new_ranks=[1]",
    "r": (
        "recovered generation={} seconds=2.5 new_ranks=[1, 2] kept_ranks=[0] requests=3 routed_tokens=70 "
        "unrouted_tokens=5 reason='rank 1 is lost'"
    ),
    "e": "recovered generation={} seconds=3.0 new_ranks=[] kept_ranks=[0, 1, 2] engine_life=1 reason='x'",
    "t": "requests of the engine before go on requests=2 routed_tokens=60 unrouted_tokens=4",
}


def log_of(*lines: str) -> str:
    """s: processes in place of others load; m2: the ranks are told to meet in group 2; r2, e2: they go on in it, and so
    does a new engine; t: with these requests."""
    return "\n".join(TEXTS[line[0]].format(line[1:]) for line in lines)


def test_recoveries_are_read_from_the_log() -> None:
    found = recoveries(f"x {log_of('m1', 'm2')}\nother\n{log_of('r2', 'm3', 'e3', 't', 't')}\n")
    assert (sorted(found.met), sorted(found.recovered)) == ([1, 2, 3], [2, 3])
    assert (found.seconds, found.num_routed, found.num_unrouted) == ((2.5, 3.0), 190, 13)


@pytest.mark.parametrize(
    ("lines", "are_told"),
    [((), True), (("m1",), False), (("m1", "r1"), True), (("m1", "r1", "m2"), False)],
)
def test_the_last_group_has_the_last_line(lines: tuple[str, ...], are_told: bool) -> None:
    assert recoveries(log_of(*lines)).are_told is are_told


@pytest.mark.parametrize(
    ("lines", "num_groups"),
    [
        ((), 0),
        (("m1", "r1"), 1),
        (("m1", "r1", "m2", "r2"), 1),  # the second came when the first was made good
        (("m1", "m2", "r2"), 2),
        (("m1", "m2", "r2", "m3", "r3"), 2),
    ],
)
def test_what_breaks_a_group_before_it_is_together_takes_another(
    lines: tuple[str, ...], num_groups: int
) -> None:
    found = recoveries(log_of(*lines))
    assert [found.took_groups(n) for n in range(4)] == [n <= num_groups for n in range(4)]


@pytest.mark.parametrize(
    ("lines", "num_starts"),
    [
        (("m1", "e1"), 0),
        (("s", "m1", "r1"), 1),
        (("s", "m1", "r1", "s", "m2", "r2"), 1),
        (("s", "s", "m1", "r1"), 2),
    ],
)
def test_who_dies_while_others_load_takes_another_start(
    lines: tuple[str, ...], num_starts: int
) -> None:
    found = recoveries(log_of(*lines))
    assert [found.took_starts(n) for n in (0, 2, 3)] == [True, num_starts >= 2, num_starts >= 3]


def test_an_engine_that_dies_when_the_ranks_are_together_again_came_too_late() -> None:
    assert recoveries(log_of("s", "m1", "e1")).took_starts(1)
    assert not recoveries(log_of("s", "m1", "r1", "m2", "e2")).took_starts(1)


def test_what_was_seen_of_a_disturbance_is_counted_and_judged() -> None:
    cut = Stream([1], ["broken"], token_times=[1.0, 7.0], client=LOST)
    wrong = replace(cut, client=OTHER)
    told = recoveries(log_of("m1", "r1"))
    seen = Observed("a rank", [WHOLE, cut, wrong], 2, 2.0, told, num_groups=1, lost_clients={LOST})
    hit = Outcome("a rank", 2, 1, 2, (wrong,), 5.0, (2.5,), 70, 5, Aim.HIT)
    assert outcome_of(seen, [WHOLE] * 3) == hit
    for number in ({"num_groups": 2}, {"num_starts": 2}):
        missed = outcome_of(replace(seen, **number), [WHOLE] * 3)
        assert missed == replace(hit, aim=Aim.MISSED)


def test_one_wrong_stream_or_too_many_that_were_cut_are_not_good_even_when_the_moment_was_missed() -> (
    None
):
    assert is_good([ONCE, AGAIN])
    assert not is_good([ONCE, replace(AGAIN, aim=Aim.MISSED, wrong=(WHOLE,))])
    assert not is_good([AGAIN, replace(ONCE, aim=Aim.MISSED, num_whole=28, num_cut=4)])


def test_a_kind_is_one_row_and_all_are_the_last() -> None:
    rows = table([ONCE, AGAIN])[2:4]
    expected = "| 2 | 100% | 63 of 64 | 1 | 0 | 3.0 | 5.0 | 5.0 | 6.0 | 90.0% |"
    assert rows == [f"| a rank {expected}", f"| **all** {expected}"]


def test_what_missed_its_moment_stands_below_the_sum_and_is_not_in_it() -> None:
    outcomes = [replace(ONCE, aim=Aim.MISSED), AGAIN, replace(ONCE, aim=Aim.GIVEN_UP)]
    rows = table(outcomes)[2:6]
    hit = "| 1 | 100% | 32 of 32 | 0 | 0 | 3.5 | 5.0 | 6.0 | 6.0 |  |"
    missed = "| 1 | 100% | 31 of 32 | 1 | 0 | 3.0 | 3.0 | 4.0 | 4.0 | 90.0% |"
    assert rows == [
        f"| a rank {hit}",
        f"| **all** {hit}",
        f"| a rank (missed its moment, drawn again) {missed}",
        f"| a rank (missed its moment for the 5th time, given up) {missed}",
    ]
    assert num_hits(outcomes) == 1


def test_a_section_is_replaced_where_it_is_and_the_others_stay() -> None:
    text = with_section(with_section("# Head\n", "One", ["1"]), "Two", ["2"])
    assert text == "# Head\n\n## One\n\n1\n\n## Two\n\n2\n"
    assert with_section(text, "One", ["1a", "1b"]) == text.replace("1\n", "1a\n1b\n")
    assert with_section(text, "Two", ["new"]) == text.replace("2\n", "new\n")
