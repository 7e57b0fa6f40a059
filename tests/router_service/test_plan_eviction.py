"""The plan book's memory: which fragments go, when, and what finds no room."""

from router_service.plans import PlannedRun, Unplanned
from tests.helpers.plan_desk import SIZE, Desk, cover_of, make_request


def bytes_of_one() -> int:
    desk = Desk()
    desk.planned(0)
    return desk.book.num_bytes


def test_fragments_in_use_are_not_evicted_and_what_finds_no_room_is_not_sent() -> None:
    desk = Desk(memory_bytes=2 * bytes_of_one())
    first = desk.planned(0, 2 * SIZE)
    second = desk.planned(1, 2 * SIZE)
    assert desk.book.take_evicted() == []
    assert cover_of(desk, first) == PlannedRun((0, 1), 2 * SIZE)
    assert cover_of(desk, second) == Unplanned("plan_memory", wait=False, max_num_tokens=SIZE)
    assert {part.fragment_id for _, part in desk.ranks.sent} == {0, 1}
    desk.book.check_invariants()
    desk.book.release(second)
    desk.book.check_invariants()
    assert desk.book.num_fragments == 2


def test_once_there_is_room_what_was_refused_is_compiled_anew() -> None:
    desk = Desk(memory_bytes=bytes_of_one())
    first, second = make_request(SIZE), make_request(SIZE, seed=1)
    desk.book.want(first)
    desk.book.want(second)
    desk.make_ready()
    refused = Unplanned("plan_memory", wait=False, max_num_tokens=SIZE)
    assert cover_of(desk, second) == refused
    desk.book.release(first)
    third = desk.planned(1)
    assert cover_of(desk, third) == PlannedRun((2,), SIZE)
    assert desk.book.take_evicted() == [0]
    assert cover_of(desk, second) == refused
    desk.book.check_invariants()


def test_the_least_recently_used_go_first_and_only_for_others() -> None:
    desk = Desk(memory_bytes=int(2.9 * bytes_of_one()))
    desk.used_once(seed=0)
    desk.used_once(seed=1)
    desk.used_once(seed=0)
    assert desk.book.take_evicted() == []
    desk.used_once(seed=2)
    assert desk.book.take_evicted() == [1]
    assert desk.book.num_fragments == 2


def test_evicted_ids_are_told_once() -> None:
    desk = Desk(memory_bytes=bytes_of_one())
    desk.used_once(seed=0)
    desk.used_once(seed=1)
    assert [desk.book.take_evicted(), desk.book.take_evicted()] == [[0], []]


def test_a_fragment_wanted_after_its_eviction_gets_another_id() -> None:
    desk = Desk(memory_bytes=bytes_of_one())
    desk.used_once(seed=0)
    desk.used_once(seed=1)
    request = desk.planned(seed=0)
    assert cover_of(desk, request) == PlannedRun((2,), SIZE)
    assert desk.lookups == (0, 3)


def test_an_acknowledgement_of_an_evicted_fragment_changes_nothing() -> None:
    desk = Desk(memory_bytes=bytes_of_one())
    desk.used_once(seed=0)
    desk.used_once(seed=1)
    desk.ranks.hold(0, [0])
    desk.book.pump()
    assert desk.book.num_fragments == 1


def test_what_ranks_have_not_acknowledged_is_not_evicted_yet() -> None:
    desk, request = Desk(memory_bytes=bytes_of_one()), make_request(SIZE)
    desk.book.want(request)
    desk.compiler.finish([0])
    desk.book.pump()
    desk.book.release(request)
    desk.ranks.hold(0, [0])
    desk.book.pump()
    other = make_request(SIZE, seed=1)
    desk.book.want(other)
    desk.compiler.finish([1])
    desk.book.pump()
    assert desk.book.take_evicted() == []
    assert cover_of(desk, other) == Unplanned("plan_memory", wait=False, max_num_tokens=SIZE)
    desk.ranks.hold(1, [0])
    desk.book.pump()
    desk.used_once(seed=2)
    assert desk.book.take_evicted() == [0]


def test_a_release_twice_is_one() -> None:
    desk = Desk(memory_bytes=bytes_of_one())
    first, second = desk.planned(0), desk.planned(0)
    desk.book.release(first)
    desk.book.release(first)
    desk.planned(1)
    desk.book.check_invariants()
    assert cover_of(desk, second) == PlannedRun((0,), SIZE)


def test_a_request_that_wants_twice_uses_its_fragments_once() -> None:
    desk = Desk(memory_bytes=bytes_of_one())
    request = desk.planned(0)
    desk.book.want(request)
    desk.book.release(request)
    desk.used_once(seed=1)
    desk.book.check_invariants()
    assert desk.book.take_evicted() == [0]
