from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.errors import ConfigError
from expert_workers.model.numerics import DeterministicNumerics, FastNumerics, grouped_linear

DETERMINISTIC = DeterministicNumerics()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rows_are_independent(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Every run of rows gives the bytes that it has in the whole."""
    whole = function(x)
    for num_rows in (1, 2, 3, 4, 5, 7, 8, 13, 33):
        for start in (0, 1, 3, 10):
            part = function(x[start : start + num_rows].clone())
            assert torch.equal(part, whole[start : start + num_rows]), (num_rows, start)


@pytest.mark.parametrize("size_in", [8, 10, 32, 64, 128, 576])
@pytest.mark.parametrize("size_out", [3, 8, 18, 64, 256])
def test_rows_of_linear_are_independent(size_in: int, size_out: int) -> None:
    weight, bias = normal(size_out, size_in, seed=1), normal(size_out, seed=2)
    x = normal(64, size_in)
    assert_rows_are_independent(lambda rows: DETERMINISTIC.linear(rows, weight), x)
    assert_rows_are_independent(lambda rows: DETERMINISTIC.linear(rows, weight, bias), x)


@pytest.mark.parametrize(
    ("size_in", "size_out"),
    [(4, 4), (8, 8), (10, 6), (10, 26), (16, 6), (32, 10), (16, 32), (128, 512)],
)
def test_rows_of_per_head_are_independent(size_in: int, size_out: int) -> None:
    weight = normal(3, size_in, size_out, seed=1)
    x = normal(64, 3, size_in)
    assert_rows_are_independent(lambda rows: DETERMINISTIC.per_head(rows, weight), x)


@pytest.mark.parametrize("width", [1, 5, 8, 31, 64])
def test_elementwise_curves_do_not_depend_on_the_place(width: int) -> None:
    x = 4.0 * normal(64, width)
    assert_rows_are_independent(DETERMINISTIC.silu, x)
    assert_rows_are_independent(DETERMINISTIC.sigmoid, x)


@pytest.mark.parametrize("width", [16, 22, 64, 128])
def test_rows_of_rms_norm_are_independent(width: int) -> None:
    weight = normal(width, seed=1)
    assert_rows_are_independent(
        lambda rows: DETERMINISTIC.rms_norm(rows, weight, 1e-6), normal(64, width)
    )


@pytest.mark.parametrize("width", [1, 5, 16, 128, 320])
def test_rows_of_softmax_are_independent_and_those_of_torch(width: int) -> None:
    x = 4.0 * normal(64, width)
    assert_rows_are_independent(DETERMINISTIC.softmax, x)
    torch.testing.assert_close(DETERMINISTIC.softmax(x), torch.softmax(x, dim=-1))


def test_rms_norm_of_heads_is_that_of_their_rows() -> None:
    x, weight = normal(5, 3, 24), normal(24, seed=1)
    heads = DETERMINISTIC.rms_norm(x, weight, 1e-6)
    assert torch.equal(heads.view(15, 24), DETERMINISTIC.rms_norm(x.view(15, 24), weight, 1e-6))
    assert_rows_are_independent(
        lambda rows: DETERMINISTIC.rms_norm(rows, weight, 1e-6), normal(64, 3, 24)
    )


def test_rows_of_groups_are_independent_from_four_rows_on() -> None:
    weight, x = normal(3, 24, 16, seed=1), normal(60, 16)
    alone = [F.linear(x, weight[expert]) for expert in range(3)]
    for first, second in ((4, 9), (9, 4), (30, 20), (0, 4)):
        ends = torch.tensor([first, first + second, 60], dtype=torch.int32)
        grouped = grouped_linear(x, weight, ends)
        assert torch.equal(grouped[:first], alone[0][:first])
        assert torch.equal(grouped[first : first + second], alone[1][first : first + second])
        assert torch.equal(grouped[first + second :], alone[2][first + second :])


@pytest.mark.parametrize("size_in", [16, 6])
def test_grouped_products_equal_single_ones(size_in: int) -> None:
    weight, x = normal(4, 12, size_in, seed=1), normal(10, size_in)
    ends = torch.tensor([3, 3, 4, 10], dtype=torch.int32)
    expected = torch.cat(
        [F.linear(x[:3], weight[0]), F.linear(x[3:4], weight[2]), F.linear(x[4:], weight[3])]
    )
    torch.testing.assert_close(grouped_linear(x, weight, ends), expected, rtol=1e-5, atol=1e-5)


def test_both_numerics_agree_on_the_curves() -> None:
    x = 8.0 * normal(100, 9)
    for name in ("silu", "sigmoid"):
        fast, careful = getattr(FastNumerics(), name)(x), getattr(DETERMINISTIC, name)(x)
        torch.testing.assert_close(careful, fast, rtol=1e-5, atol=1e-6)


def test_extreme_values_stay_finite() -> None:
    x = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    assert DETERMINISTIC.sigmoid(x).tolist() == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0])
    assert DETERMINISTIC.silu(x).tolist() == pytest.approx([0.0, 0.0, 0.0, 100.0, 1e4])


def test_empty_inputs_keep_their_width() -> None:
    assert DETERMINISTIC.linear(torch.zeros(0, 8), normal(5, 8)).shape == (0, 5)
    assert DETERMINISTIC.per_head(torch.zeros(0, 3, 8), normal(3, 8, 6)).shape == (0, 3, 6)


def test_deterministic_numerics_refuse_a_second_thread() -> None:
    torch.set_num_threads(2)
    try:
        with pytest.raises(ConfigError, match="one torch thread, got 2"):
            DeterministicNumerics()
    finally:
        torch.set_num_threads(1)
