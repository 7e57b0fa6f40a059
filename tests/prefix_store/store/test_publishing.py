"""Which computed blocks become the tree's, which stay private, and what is refused."""

import pytest

from cluster.errors import StoreError
from cluster.routes import RouteShape
from cluster.types import BlockId
from prefix_store.store import PrefixStore
from tests.prefix_store.builders import (
    BLOCK_SIZE,
    NAMESPACE,
    RANK0,
    RANK1,
    gate,
    gates,
    insert,
    make_store,
    route_block_bytes,
    tokens,
    write,
)

B = BLOCK_SIZE


def test_the_same_blocks_from_another_rank_are_added_there() -> None:
    store = make_store()
    insert(store, tokens(3 * B), rank=RANK0)

    written = write(store, tokens(3 * B), rank=RANK1)

    assert written.publication.outcomes == ("added",) * 3
    assert store.match(NAMESPACE, tokens(3 * B)).num_kv_tokens == (3 * B, 3 * B)
    assert store.kv_block_ids(written.lease, RANK1, 3 * B) == written.block_ids
    assert store.stats().route_bytes == 3 * route_block_bytes()


def test_the_second_of_two_equal_requests_keeps_its_duplicate() -> None:
    store = make_store()
    sequence = tokens(2 * B)
    lease = store.acquire(NAMESPACE, sequence, 0)
    mine = store.allocate(RANK0, 2)
    assert mine is not None
    first = write(store, sequence)

    publication = store.publish(lease, RANK0, sequence, 0, mine, gates(sequence, 0, 2))

    assert publication.outcomes == ("duplicate", "duplicate")
    assert lease.num_tokens == 2 * B
    assert store.kv_block_ids(lease, RANK0, 2 * B) == first.block_ids
    store.free(RANK0, mine)
    store.check_invariants()


def test_other_ids_make_this_block_and_all_later_ones_private() -> None:
    store = make_store()
    sequence = tokens(4 * B)
    insert(store, sequence[: 3 * B])
    routes = gates(sequence, 0, 4, variants=frozenset({1}))

    written = write(store, sequence, rank=RANK1, routes=routes)

    assert written.publication.outcomes == ("added", "private", "private", "private")
    assert written.publication.conflict
    assert written.lease.num_tokens == B
    assert store.match(NAMESPACE, sequence).num_kv_tokens == (3 * B, B)
    store.check_invariants()


def test_nothing_is_added_after_a_conflict_even_if_others_fill_the_gap() -> None:
    store = make_store()
    sequence = tokens(2 * B)
    insert(store, sequence)
    store.evict("kv")
    lease = store.acquire(NAMESPACE, sequence, 2 * B)
    mine = store.allocate(RANK0, 2)
    assert mine is not None
    own = gate(sequence[:B], variant=1)
    assert store.publish(lease, RANK0, sequence, 0, mine[:1], own).conflict
    store.evict("all")
    write(store, sequence[:B])

    publication = store.publish(lease, RANK0, sequence, 1, mine[1:], gates(sequence, 1, 2))

    assert publication.outcomes == ("private",)
    assert store.match(NAMESPACE, sequence).num_kv_tokens == (B, 0)


def test_blocks_after_a_gap_are_private() -> None:
    store = make_store()
    sequence = tokens(2 * B)
    lease = store.acquire(NAMESPACE, sequence, 0)
    block_ids = store.allocate(RANK0, 1)
    assert block_ids is not None

    publication = store.publish(lease, RANK0, sequence, 1, block_ids, gates(sequence, 1, 2))

    assert publication.outcomes == ("private",)
    assert not publication.conflict
    assert store.stats().num_nodes == 0


def test_a_block_without_kv_before_it_on_the_rank_is_private() -> None:
    store = make_store()
    sequence = tokens(2 * B)
    insert(store, sequence, rank=RANK0)
    lease = store.acquire(NAMESPACE, sequence, 2 * B)
    block_ids = store.allocate(RANK1, 1)
    assert block_ids is not None

    publication = store.publish(lease, RANK1, sequence, 1, block_ids, gates(sequence, 1, 2))

    assert publication.outcomes == ("private",)
    store.check_invariants()


def _publish_wrongly(store: PrefixStore, case: str) -> None:
    sequence = tokens(2 * B)
    written = write(store, sequence)
    block_ids = store.allocate(RANK0, 1)
    assert block_ids is not None
    longer = tokens(3 * B)
    routes = gates(longer, 2, 3)
    wide = gate(longer, shape=RouteShape(2, 2, 300))
    arguments = {
        "another sequence": (tokens(3 * B, first=7), block_ids, routes),
        "a partial block": (tokens(3 * B - 1), block_ids, routes),
        "missing routes": (longer, block_ids, routes.slice(0, B - 1)),
        "another model's routes": (longer, block_ids, wide),
        "a block of the tree": (longer, written.block_ids[:1], routes),
        "a free block": (longer, [BlockId(15)], routes),
    }
    token_ids, offered, made = arguments[case]
    store.publish(written.lease, RANK0, token_ids, 2, offered, made)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("another sequence", "differ from those of the lease"),
        ("a partial block", "full blocks only"),
        ("missing routes", "the routes of every token"),
        ("another model's routes", "this model's are"),
        ("a block of the tree", "is the tree's"),
        ("a free block", "is free"),
    ],
)
def test_a_publish_whose_parts_do_not_belong_together_changes_nothing(
    case: str, message: str
) -> None:
    store = make_store()

    with pytest.raises(StoreError, match=message):
        _publish_wrongly(store, case)

    assert store.match(NAMESPACE, tokens(3 * B)).num_route_tokens == 2 * B
    assert store.stats().kv_blocks_free == (13, 16)
    store.check_invariants()
