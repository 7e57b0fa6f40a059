"""Routes of blocks as bytes: what goes in comes out, block by block."""

import numpy as np
import pytest

from cluster.routes import ExpertRoutes, RouteShape
from prefix_store.packed_routes import PackedRoutes
from tests.prefix_store.builders import BLOCK_SIZE, SHAPE, gates, packed, tokens

B = BLOCK_SIZE
WIDE = RouteShape(num_moe_layers=3, num_experts_per_tok=2, num_experts=384)


@pytest.mark.parametrize("shape", [SHAPE, WIDE], ids=["uint8", "uint16"])
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 5])
def test_unpacking_gives_what_was_packed(num_blocks: int, shape: RouteShape) -> None:
    routes = gates(tokens(5 * B), 0, num_blocks, shape=shape)

    unpacked = PackedRoutes.pack(routes, num_blocks).unpack(shape)

    assert unpacked.topk_ids.dtype == shape.id_dtype
    assert np.array_equal(unpacked.topk_ids, routes.topk_ids)
    assert np.array_equal(unpacked.topk_weights, routes.topk_weights)


def test_routes_that_lie_apart_in_memory_are_packed_token_by_token() -> None:
    routes = gates(tokens(4 * B), 0, 4)
    every_other = ExpertRoutes(routes.topk_ids[::2], routes.topk_weights[::2])

    unpacked = PackedRoutes.pack(every_other, 2).unpack(SHAPE)

    assert np.array_equal(unpacked.topk_ids, every_other.topk_ids)
    assert np.array_equal(unpacked.topk_weights, every_other.topk_weights)


def test_later_writes_to_packed_arrays_change_nothing() -> None:
    routes = gates(tokens(2 * B), 0, 2)
    run = PackedRoutes.pack(routes, 2)
    routes.topk_ids[:] = 0

    assert run == packed(tokens(2 * B), 0, 2)


@pytest.mark.parametrize(("variant", "num_equal"), [(0, 0), (2, 2), (3, 3)])
def test_equal_blocks_are_counted_up_to_the_first_other_id(variant: int, num_equal: int) -> None:
    recorded = packed(tokens(4 * B), 0, 4)
    other = gates(tokens(4 * B), 0, 4, variants=frozenset({variant}))

    assert PackedRoutes.pack(other, 4).num_equal(recorded) == num_equal


def test_other_weights_with_equal_ids_are_equal_blocks() -> None:
    routes = gates(tokens(2 * B), 0, 2)
    other = ExpertRoutes(routes.topk_ids, routes.topk_weights + 1)

    assert PackedRoutes.pack(other, 2).num_equal(packed(tokens(2 * B), 0, 2)) == 2
