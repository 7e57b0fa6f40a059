"""The eviction queue against its plain twin, and the promise that it does not grow with the number of offers."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.types import BlockId
from prefix_store.eviction import (
    LruQueue,
    kv_eviction_stamp,
    oldest_by_scan,
    route_eviction_stamp,
)
from prefix_store.payload import NodePayload
from prefix_store.radix_tree import RadixNode
from tests.prefix_store.builders import NAMESPACE, RANK0, RANK1, packed, tokens


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


def make_node(*, num_kv_blocks: int = 2, num_leases: int = 0) -> RadixNode:
    """Two blocks, last used at time 7 (routes) and 5 (KV on rank 0)."""
    payload = NodePayload(7, packed(tokens(8), 0, 2))
    if num_kv_blocks:
        payload.kv[RANK0] = [BlockId(block) for block in range(num_kv_blocks)]
        payload.kv_stamps[RANK0] = 5
    edge = bytearray(tokens(8).tobytes())
    return RadixNode(NAMESPACE, None, 0, 2, edge, payload, num_leases=num_leases)


def test_kv_may_go_from_an_unleased_node_whose_children_have_none_on_the_rank() -> None:
    free, leased, above_kv = make_node(), make_node(num_leases=1), make_node()
    above_kv.num_kv_children[RANK0] = 1
    other_rank_below = make_node()
    other_rank_below.num_kv_children[RANK1] = 1

    stamps = [kv_eviction_stamp(n, RANK0) for n in (free, leased, above_kv, other_rank_below)]

    assert stamps == [5, None, None, 5]
    assert kv_eviction_stamp(free, RANK1) is None


def test_routes_may_go_from_an_unleased_leaf_whose_last_block_has_no_kv() -> None:
    inner = make_node(num_kv_blocks=0)
    inner.children[b"2"] = make_node()
    nodes = [
        make_node(num_kv_blocks=0),
        make_node(num_kv_blocks=1),
        make_node(num_kv_blocks=2),
        make_node(num_kv_blocks=0, num_leases=1),
        inner,
    ]

    assert [route_eviction_stamp(node) for node in nodes] == [7, 7, None, None, None]
