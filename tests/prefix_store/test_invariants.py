"""A store that broke is noticed, with a drawing."""

from collections.abc import Callable

import pytest

from cluster.types import BlockId
from prefix_store.invariants import draw
from prefix_store.radix_tree import RadixNode
from prefix_store.store import PrefixStore
from tests.prefix_store.builders import (
    BLOCK_SIZE,
    NAMESPACE,
    RANK0,
    RANK1,
    branch,
    insert,
    make_store,
    tokens,
    write,
)


def make_branched_store() -> PrefixStore:
    """One node of two blocks above two leaves of one block; rank 0 has all KV, the first leaf is leased."""
    store = make_store()
    insert(store, branch(2 * BLOCK_SIZE, BLOCK_SIZE))
    write(store, tokens(3 * BLOCK_SIZE))
    store.check_invariants()
    return store


def top_node(store: PrefixStore) -> RadixNode:
    root = store._tree.root(NAMESPACE)
    assert root is not None
    return next(iter(root.children.values()))


def miscount_leases(store: PrefixStore) -> None:
    top_node(store).num_leases += 1


def lose_a_route(store: PrefixStore) -> None:
    top_node(store).payload.routes.topk_weights.pop()


def cut_a_route_short(store: PrefixStore) -> None:
    ids = top_node(store).payload.routes.topk_ids
    ids[1] = ids[1][:-1]


def lose_a_token(store: PrefixStore) -> None:
    del top_node(store).edge[-4:]


def tear_kv(store: PrefixStore) -> None:
    top_node(store).payload.kv[RANK0].pop()


def hold_a_block_twice(store: PrefixStore) -> None:
    block_ids = top_node(store).payload.kv[RANK0]
    block_ids[1] = block_ids[0]


def take_a_free_block(store: PrefixStore) -> None:
    top_node(store).payload.kv[RANK1] = [BlockId(3)]
    top_node(store).payload.kv_stamps[RANK1] = 1


def miscount_sizes(store: PrefixStore) -> None:
    store._account.routes.lease(1)


def forget_a_candidate(store: PrefixStore) -> None:
    for leaf in top_node(store).children.values():
        leaf.payload.kv_stamps[RANK0] += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (miscount_leases, "leases at 0 are off"),
        (lose_a_route, "a block without routes"),
        (cut_a_route_short, "routes of a wrong length"),
        (lose_a_token, "an edge's size"),
        (tear_kv, "KV below a gap"),
        (hold_a_block_twice, "held twice"),
        (take_a_free_block, "blocks of the tree leaked"),
        (miscount_sizes, "the route account is off"),
        (forget_a_candidate, "KV queue 0 misses a candidate"),
    ],
)
def test_damage_is_named(damage: Callable[[PrefixStore], None], message: str) -> None:
    store = make_branched_store()
    damage(store)

    with pytest.raises(AssertionError, match=message):
        store.check_invariants()


def test_the_drawing_shows_ranges_leases_and_blocks() -> None:
    drawing = draw(make_branched_store()._tree).splitlines()

    assert drawing[0] == "tenant-a leases=1"
    assert drawing[1] == "  [0, 2) leases=1 kv[0]=[0, 1]"
    assert sorted(drawing[2:]) == [
        "    [2, 3) leases=0 kv[0]=[2]",
        "    [2, 3) leases=1 kv[0]=[3]",
    ]
