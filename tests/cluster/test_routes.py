import numpy as np
import pytest

from cluster.routes import ExpertRoutes, RouteShape


def make_routes(num_tokens: int, first: int = 0) -> ExpertRoutes:
    ids = (np.arange(num_tokens * 6).reshape(num_tokens, 3, 2) + first).astype(np.uint8)
    return ExpertRoutes(ids, ids.astype(np.float32))


@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [(8, np.uint8), (128, np.uint8), (256, np.uint8), (257, np.uint16), (512, np.uint16)],
)
def test_ids_take_one_byte_up_to_256_experts_and_two_above(num_experts: int, dtype: type) -> None:
    shape = RouteShape(4, 8, num_experts)
    assert shape.id_dtype == dtype
    assert shape.bytes_per_token == 4 * 8 * (np.dtype(dtype).itemsize + 4)


def test_slices_and_concatenation_are_inverse() -> None:
    routes = make_routes(5)
    shape = RouteShape(3, 2, 200)
    joined = ExpertRoutes.concatenate([routes.slice(0, 2), routes.slice(2, 5)], shape)
    assert joined.same_ids(routes)
    assert joined.num_bytes == 5 * shape.bytes_per_token
    assert ExpertRoutes.concatenate([], shape).num_tokens == 0


def test_ids_and_weights_of_different_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        ExpertRoutes(np.zeros((2, 3, 2), np.uint8), np.zeros((2, 3, 1), np.float32))
