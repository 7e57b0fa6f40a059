"""How a run of disturbances is judged and told."""

import pytest

from tests.chaos.document import with_section
from tests.chaos.outcomes import Outcome, recoveries, table, wrong_streams
from tests.chaos.streams import Stream, longest_pause

WHOLE = Stream([1, 2, 3], is_whole=True)


@pytest.mark.parametrize(
    ("end", "is_right", "is_right_cut"),
    [
        (Stream([1, 2, 3], is_whole=True), True, True),
        (Stream([1, 2, 4], is_whole=True), False, False),
        (Stream([1, 2], is_whole=True), False, False),
        (Stream([1, 2], error="broken"), False, True),
        (Stream([1, 3], error="broken"), False, False),
        (Stream([], error="broken"), False, True),
    ],
)
def test_a_stream_is_the_undisturbed_one_or_where_it_may_be_cut_its_beginning(
    end: Stream, is_right: bool, is_right_cut: bool
) -> None:
    assert (wrong_streams([end], [WHOLE], may_be_cut=False) == []) is is_right
    assert (wrong_streams([end], [WHOLE], may_be_cut=True) == []) is is_right_cut


def test_the_longest_pause_is_of_all_streams_together_and_begins_with_the_disturbance() -> None:
    streams = [Stream(token_times=[1.0, 2.0, 9.0]), Stream(token_times=[5.0, 9.5])]
    assert longest_pause(streams, since=2.5) == 4.0
    assert longest_pause(streams, since=0.0) == 4.0
    assert longest_pause(streams, since=9.6) == 0.0


def test_recoveries_are_read_from_the_log() -> None:
    of_ranks = (
        "recovered generation=1 seconds=2.5 new_ranks=[1, 2] kept_ranks=[0] requests=3 routed_tokens=70 "
        "unrouted_tokens=5 reason='rank 1 is lost'"
    )
    of_an_engine = "recovered generation=2 seconds=3.0 new_ranks=[] kept_ranks=[0, 1, 2] engine_life=1 reason='x'"
    taken_up = "requests of the engine before go on requests=2 routed_tokens=60 unrouted_tokens=4"
    log = f"x {of_ranks}\nother\n{of_an_engine}\n{taken_up}\n{taken_up}\n"
    assert recoveries(log) == ((2.5, 3.0), 190, 13)


def test_a_kind_is_one_row_and_all_are_the_last() -> None:
    once = Outcome("a rank", 32, 31, 1, 0, 4.0, (3.0,), 90, 10)
    again = Outcome("a rank", 32, 32, 0, 0, 6.0, (2.0, 5.0), 0, 0)
    rows = table([once, again])[2:4]
    expected = "| 2 | 100% | 63 of 64 | 1 | 0 | 3.0 | 5.0 | 5.0 | 6.0 | 90.0% |"
    assert rows == [f"| a rank {expected}", f"| **all** {expected}"]


def test_a_section_is_replaced_where_it_is_and_the_others_stay() -> None:
    text = with_section(with_section("# Head\n", "One", ["1"]), "Two", ["2"])
    assert text == "# Head\n\n## One\n\n1\n\n## Two\n\n2\n"
    assert with_section(text, "One", ["1a", "1b"]) == text.replace("1\n", "1a\n1b\n")
    assert with_section(text, "Two", ["new"]) == text.replace("2\n", "new\n")
