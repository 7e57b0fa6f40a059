"""Behaviour of the prefix store, one case at a time."""

import numpy as np
import pytest

from cluster.errors import ConfigError, StoreError
from cluster.routes import ExpertRoutes, RouteShape
from cluster.types import BlockId, Namespace, Rank
from prefix_store.radix_tree import BlockKeys, RadixTree
from prefix_store.store import PrefixStore
from tests.prefix_store.builders import (
    BLOCK_SIZE,
    KV_BYTES_PER_BLOCK,
    NAMESPACE,
    RANK0,
    RANK1,
    SHAPE,
    branch,
    finish,
    gate,
    gates,
    insert,
    make_store,
    route_block_bytes,
    tokens,
    write,
)

B = BLOCK_SIZE


# Matching


@pytest.mark.parametrize(
    ("length", "num_blocks"), [(0, 0), (B - 1, 0), (B, 1), (B + 1, 1), (2 * B, 2), (2 * B + 1, 2)]
)
def test_only_full_blocks_are_found(length: int, num_blocks: int) -> None:
    store = make_store()
    insert(store, tokens(length))

    match = store.match(NAMESPACE, tokens(length))

    assert match.num_route_tokens == num_blocks * B
    assert match.num_kv_tokens == (num_blocks * B, 0)
    store.check_invariants()


@pytest.mark.parametrize("extra", [0, 1, B - 1])
@pytest.mark.parametrize("shared_blocks", [0, 1, 2, 3])
def test_prompts_share_the_full_blocks_that_are_equal(shared_blocks: int, extra: int) -> None:
    store = make_store()
    insert(store, tokens(4 * B))
    other = branch(shared_blocks * B + extra, 3 * B)

    match = store.match(NAMESPACE, other)
    insert(store, other)

    assert match.num_kv_tokens == (shared_blocks * B, 0)
    num_blocks = len(other) // B
    assert store.match(NAMESPACE, other).num_kv_tokens == (num_blocks * B, 0)
    assert store.match(NAMESPACE, tokens(4 * B)).num_kv_tokens == (4 * B, 0)
    assert store.stats().kv_bytes == (4 + num_blocks - shared_blocks) * KV_BYTES_PER_BLOCK
    store.check_invariants()


def test_a_match_changes_nothing() -> None:
    store = make_store()
    insert(store, tokens(4 * B))
    before = store.stats()

    store.match(NAMESPACE, branch(B, 3 * B))
    store.match(Namespace("unknown"), tokens(4 * B))

    assert store.stats() == before


def test_namespaces_never_share_blocks() -> None:
    store = make_store()
    insert(store, tokens(2 * B))

    other = Namespace("tenant-b")

    assert store.match(other, tokens(2 * B)).num_route_tokens == 0
    insert(store, tokens(2 * B), namespace=other)
    assert store.match(other, tokens(2 * B)).num_route_tokens == 2 * B
    assert store.stats().kv_bytes == 4 * KV_BYTES_PER_BLOCK


def test_a_namespace_goes_with_its_last_block() -> None:
    store = make_store()
    insert(store, tokens(2 * B))
    lease = store.acquire(Namespace("empty"), tokens(B), 0)

    store.evict("all")
    store.release(lease)

    store.check_invariants()  # refuses a namespace without nodes and leases
    assert store.stats().num_nodes == 0


class CountingKeys(BlockKeys):
    """Counts how often a block is looked at."""

    num_reads = 0

    def __getitem__(self, block: int) -> bytes:
        self.num_reads += 1
        return super().__getitem__(block)


def test_matching_100k_tokens_looks_at_each_block_at_most_twice() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=6250, shape=RouteShape(1, 1, 8), block_size=16)
    prompt = tokens(100_000)
    written = write(store, prompt, shape=RouteShape(1, 1, 8), block_size=16)
    tree: RadixTree = store._tree
    root = tree.root(NAMESPACE)
    assert root is not None
    keys = CountingKeys(prompt, 16)

    path = tree.descend(root, keys, len(keys))

    assert sum(part.num_blocks for part in path) == 6250
    assert keys.num_reads <= 2 * 6250
    assert store.stats().num_nodes == 1
    finish(store, written)


def test_token_ids_of_another_dtype_are_refused() -> None:
    with pytest.raises(StoreError, match="int32"):
        make_store().match(NAMESPACE, np.arange(8))  # type: ignore[arg-type]  # the point


# Leases


def test_a_lease_in_the_middle_of_a_node_protects_exactly_its_tokens() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=6)
    insert(store, tokens(6 * B))
    lease = store.acquire(NAMESPACE, tokens(6 * B), 2 * B)

    assert store.stats().kv_blocks_leased == 2
    assert store.num_allocatable(RANK0) == 4
    assert store.allocate(RANK0, 5) is None
    block_ids = store.allocate(RANK0, 4)

    assert block_ids is not None
    assert len(block_ids) == 4
    assert store.match(NAMESPACE, tokens(6 * B)).num_kv_tokens == (2 * B,)
    assert set(store.kv_block_ids(lease, RANK0, 2 * B)).isdisjoint(block_ids)
    store.check_invariants()


def test_a_matched_leaf_under_lease_survives_eviction_of_everything_else() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=8)
    insert(store, tokens(4 * B))
    insert(store, tokens(4 * B, first=500))
    lease = store.acquire(NAMESPACE, tokens(4 * B), 4 * B)
    held = store.kv_block_ids(lease, RANK0, 4 * B)

    block_ids = store.allocate(RANK0, 4)

    assert block_ids is not None
    assert set(block_ids).isdisjoint(held)
    assert store.match(NAMESPACE, tokens(4 * B, first=500)).num_kv_tokens == (0,)
    assert store.match(NAMESPACE, tokens(4 * B)).num_kv_tokens == (4 * B,)


def test_splitting_a_leased_node_keeps_both_halves_leased() -> None:
    store = make_store()
    insert(store, tokens(4 * B))
    whole = store.acquire(NAMESPACE, tokens(4 * B), 4 * B)
    half = store.acquire(NAMESPACE, branch(2 * B, 2 * B), 2 * B)

    assert store.stats().num_nodes == 2
    assert store.stats().kv_blocks_leased == 4
    store.release(half)
    assert store.stats().kv_blocks_leased == 4
    store.check_invariants()
    store.release(whole)

    assert store.stats().kv_blocks_leased == 0
    assert (whole.num_tokens, half.num_tokens) == (4 * B, 2 * B)
    store.check_invariants()


def test_growing_one_lease_does_not_grow_another_on_the_same_node() -> None:
    store = make_store()
    written = write(store, tokens(2 * B))
    other = store.acquire(NAMESPACE, tokens(2 * B), 2 * B)

    block_ids = store.allocate(RANK0, 1)
    assert block_ids is not None
    store.publish(written.lease, RANK0, tokens(3 * B), 2, block_ids, gates(tokens(3 * B), 2, 3))
    finish(store, written)

    assert other.num_tokens == 2 * B
    assert store.stats().kv_blocks_leased == 2
    store.check_invariants()


def test_a_sole_holder_grows_its_node_in_place() -> None:
    store = make_store()
    sequence = tokens(6 * B)
    written = write(store, sequence[: 2 * B])

    for block in range(2, 6):
        block_ids = store.allocate(RANK0, 1)
        assert block_ids is not None
        routes = gates(sequence, block, block + 1)
        store.publish(written.lease, RANK0, sequence[: (block + 1) * B], block, block_ids, routes)

    assert written.lease.num_tokens == 6 * B
    assert store.stats().num_nodes == 1


def test_a_lease_is_released_once() -> None:
    store = make_store()
    lease = store.acquire(NAMESPACE, tokens(B), 0)
    store.release(lease)

    with pytest.raises(StoreError, match="was released"):
        store.release(lease)
    with pytest.raises(StoreError, match="was released"):
        store.routes(lease, 0, 0)


@pytest.mark.parametrize("num_tokens", [1, B - 1, 3 * B, -B])
def test_a_lease_covers_whole_blocks_that_exist(num_tokens: int) -> None:
    store = make_store()
    insert(store, tokens(2 * B))

    with pytest.raises(StoreError, match="lease of"):
        store.acquire(NAMESPACE, tokens(3 * B), num_tokens)
    store.check_invariants()


# Allocation and eviction


def test_with_only_leased_blocks_left_allocation_gives_none_and_changes_nothing() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=4)
    write(store, tokens(4 * B))
    before = store.stats()

    assert store.allocate(RANK0, 1) is None

    assert store.stats() == before
    assert store.num_allocatable(RANK0) == 0


def test_with_only_leased_routes_left_publishing_fails_softly() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=3)
    insert(store, tokens(3 * B))
    store.evict("kv")
    replaying = store.acquire(NAMESPACE, tokens(3 * B), 3 * B)

    written = write(store, tokens(3 * B, first=500))

    assert written.publication.outcomes == ("private",) * 3
    assert not written.publication.conflict
    assert written.lease.num_tokens == 0
    store.check_invariants()
    finish(store, written)
    store.release(replaying)
    assert write(store, tokens(3 * B, first=500)).publication.outcomes == ("added",) * 3


def test_kv_of_the_prefix_used_longest_ago_goes_first() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=6)
    old, young = tokens(3 * B), tokens(3 * B, first=500)
    insert(store, old)
    insert(store, young)
    lease = store.acquire(NAMESPACE, old, 3 * B)
    store.kv_block_ids(lease, RANK0, 3 * B)
    store.release(lease)

    assert store.allocate(RANK0, 2) is not None

    assert store.match(NAMESPACE, young).num_kv_tokens == (B,)
    assert store.match(NAMESPACE, old).num_kv_tokens == (3 * B,)


def test_use_on_one_rank_does_not_keep_the_kv_of_another() -> None:
    store = make_store(num_ranks=2, num_kv_blocks=4)
    shared, other = tokens(2 * B), tokens(2 * B, first=500)
    insert(store, shared, rank=RANK1)
    insert(store, other, rank=RANK1)
    insert(store, shared, rank=RANK0)

    assert store.allocate(RANK1, 1) is not None

    assert store.match(NAMESPACE, shared).num_kv_tokens == (2 * B, B)
    assert store.match(NAMESPACE, other).num_kv_tokens == (0, 2 * B)


def test_kv_goes_before_routes() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=4)
    insert(store, tokens(4 * B))

    block_ids = store.allocate(RANK0, 4)

    assert block_ids is not None
    match = store.match(NAMESPACE, tokens(4 * B))
    assert match.num_kv_tokens == (0,)
    assert match.num_route_tokens == 4 * B


def test_a_publish_evicts_routes_used_longest_ago_but_none_under_kv() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=4)
    insert(store, tokens(2 * B))
    insert(store, tokens(2 * B, first=500))
    assert store.allocate(RANK0, 2) is not None  # takes the KV of the first

    written = write(store, branch(0, B, first=900))

    assert written.publication.outcomes == ("added",)
    assert store.match(NAMESPACE, tokens(2 * B)).num_route_tokens == B
    assert store.match(NAMESPACE, tokens(2 * B, first=500)).num_kv_tokens == (B,)
    assert store.match(NAMESPACE, tokens(2 * B, first=500)).num_route_tokens == 2 * B


def test_evicting_kv_by_command_keeps_routes_and_leased_nodes() -> None:
    store = make_store()
    insert(store, tokens(4 * B))
    insert(store, tokens(2 * B, first=500))
    lease = store.acquire(NAMESPACE, tokens(4 * B), 2 * B)

    eviction = store.evict("kv")

    assert (eviction.part, eviction.nodes, eviction.kept_leased) == ("kv", 2, 1)
    assert eviction.num_bytes == 4 * KV_BYTES_PER_BLOCK
    match = store.match(NAMESPACE, tokens(4 * B))
    assert (match.num_kv_tokens, match.num_route_tokens) == ((2 * B, 0), 4 * B)
    store.release(lease)
    store.check_invariants()


@pytest.mark.parametrize("part", ["routes", "all"])
def test_evicting_routes_by_command_takes_the_kv_along(part: str) -> None:
    store = make_store()
    insert(store, tokens(4 * B), rank=RANK0)
    insert(store, tokens(3 * B), rank=RANK1)

    eviction = store.evict("routes" if part == "routes" else "all")

    assert eviction.num_bytes == 7 * KV_BYTES_PER_BLOCK + 4 * route_block_bytes()
    assert store.match(NAMESPACE, tokens(4 * B)).num_route_tokens == 0
    assert store.stats().kv_blocks_free == (16, 16)
    assert store.stats().num_nodes == 0


def test_blocks_that_are_free_or_the_trees_cannot_be_freed() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=4)
    written = write(store, tokens(B))
    owned = store.allocate(RANK0, 1)
    assert owned is not None
    before = store.stats()

    with pytest.raises(StoreError, match="is the tree's"):
        store.free(RANK0, [*owned, *written.block_ids])
    with pytest.raises(StoreError, match="is free"):
        store.free(RANK0, [*owned, BlockId(3)])
    with pytest.raises(StoreError, match="twice"):
        store.free(RANK0, [*owned, *owned])
    with pytest.raises(StoreError, match="does not exist"):
        store.free(RANK0, [BlockId(4)])

    assert store.stats() == before


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(StoreError, match="rank 2"):
        make_store(num_ranks=2).allocate(Rank(2), 1)


# Publishing


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
    routes = gates(sequence, 0, 4)
    routes[1] = gate(sequence[: 2 * B], variant=1)

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
    own = [gate(sequence[:B], variant=1)]
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
        "missing routes": (longer, block_ids, []),
        "another model's routes": (longer, block_ids, [wide]),
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
        ("missing routes", "one each"),
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


# Routes


@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 4 * B), (1, 2), (B - 1, 2 * B + 1), (B, B)])
def test_routes_of_any_range_are_those_published(start: int, end: int) -> None:
    store = make_store()
    insert(store, tokens(4 * B))
    insert(store, branch(2 * B, B))  # splits the node
    lease = store.acquire(NAMESPACE, tokens(4 * B), 4 * B)

    got = ExpertRoutes.concatenate(store.routes(lease, start, end), SHAPE)

    expected = ExpertRoutes.concatenate(gates(tokens(4 * B), 0, 4), SHAPE).slice(start, end)
    assert np.array_equal(got.topk_ids, expected.topk_ids)
    assert np.array_equal(got.topk_weights, expected.topk_weights)


def test_routes_outlive_their_eviction_and_nobody_can_write_them() -> None:
    store = make_store()
    sequence = tokens(B)
    published = gates(sequence, 0, 1)
    finish(store, write(store, sequence, routes=published))
    published[0].topk_ids[:] = 0
    lease = store.acquire(NAMESPACE, sequence, B)
    (routes,) = store.routes(lease, 0, B)
    store.release(lease)

    store.evict("all")

    assert np.array_equal(routes.topk_ids, gate(sequence).topk_ids)
    for array in (routes.topk_ids, routes.topk_weights):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)


def test_routes_beyond_the_lease_are_refused() -> None:
    store = make_store()
    insert(store, tokens(2 * B))
    lease = store.acquire(NAMESPACE, tokens(2 * B), B)

    with pytest.raises(StoreError, match="under a lease of 4 tokens"):
        store.routes(lease, 0, B + 1)


def test_kv_that_the_rank_does_not_hold_is_refused() -> None:
    store = make_store()
    insert(store, tokens(2 * B), rank=RANK0)
    lease = store.acquire(NAMESPACE, tokens(2 * B), 2 * B)

    with pytest.raises(StoreError, match="rank 1"):
        store.kv_block_ids(lease, RANK1, B)


def test_ids_above_255_survive_for_models_with_more_than_256_experts() -> None:
    shape = RouteShape(num_moe_layers=3, num_experts_per_tok=2, num_experts=384)
    store = make_store(shape=shape)
    sequence = tokens(64 * B // 8)
    finish(store, write(store, sequence, shape=shape))
    lease = store.acquire(NAMESPACE, sequence, len(sequence))

    routes = ExpertRoutes.concatenate(store.routes(lease, 0, len(sequence)), shape)

    expected = gates(sequence, 0, len(sequence) // B, shape=shape)
    assert routes.topk_ids.dtype == np.uint16
    assert routes.topk_ids.max() > 255
    assert np.array_equal(routes.topk_ids, np.concatenate([r.topk_ids for r in expected]))


# Sizes


def test_a_route_budget_below_the_routes_of_all_kv_is_refused_with_both_numbers() -> None:
    needed = 2 * 16 * route_block_bytes()

    with pytest.raises(
        ConfigError, match=rf"{needed - 1} bytes .* {needed} bytes .*--route-memory"
    ):
        PrefixStore(
            num_ranks=2,
            num_kv_blocks=16,
            block_size=B,
            route_shape=SHAPE,
            route_budget_bytes=needed - 1,
            kv_bytes_per_block=KV_BYTES_PER_BLOCK,
        )


def test_stats_count_free_used_leased_and_evicted() -> None:
    store = make_store(num_ranks=1, num_kv_blocks=4)
    insert(store, tokens(3 * B))
    written = write(store, tokens(2 * B))
    assert store.allocate(RANK0, 2) is not None

    stats = store.stats()

    assert (stats.kv_blocks_free, stats.kv_blocks_used) == ((0,), (4,))
    assert stats.kv_blocks_leased == 2
    assert stats.kv_bytes == 2 * KV_BYTES_PER_BLOCK
    assert stats.route_bytes == 3 * route_block_bytes()
    assert (stats.kv_blocks_evicted, stats.route_blocks_evicted) == (1, 0)
    finish(store, written)
