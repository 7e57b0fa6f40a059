"""The eviction queue against its plain twin, and the promise that it does not grow with the number of offers."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_store.eviction import LruQueue, oldest_by_scan


@dataclass(eq=False)
class Item:
    stamp: int | None = None


def stamp_of(item: Item) -> int | None:
    return item.stamp


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=300))
def test_the_queue_names_the_item_that_a_scan_would(changes: list[tuple[int, bool]]) -> None:
    items = [Item() for _ in range(10)]
    queue = LruQueue(stamp_of)

    for now, (index, candidate) in enumerate(changes):
        items[index].stamp = now if candidate else None
        queue.offer(items[index])

        assert queue.oldest() is oldest_by_scan(items, stamp_of)


def test_entries_stay_within_twice_the_candidates_however_often_they_are_offered() -> None:
    items = [Item() for _ in range(100)]
    queue = LruQueue(stamp_of)

    for now in range(20_000):
        items[now % 100].stamp = now
        queue.offer(items[now % 100])

    assert len(queue) <= 2 * 100
