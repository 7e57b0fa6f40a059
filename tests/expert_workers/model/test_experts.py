import pytest
import torch
from torch import Tensor

from expert_workers.dispatch.base import DispatchedTokens
from expert_workers.model.experts import run_experts
from expert_workers.model.numerics import DeterministicNumerics, FastNumerics, Numerics
from expert_workers.model.weights import ExpertWeights
from tests.reference.loop_experts import loop_experts

NUMERICS = [FastNumerics(), DeterministicNumerics()]
NAMES = ["fast", "deterministic"]


def make_weights(num_experts: int, hidden: int, intermediate: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(2)
    gate_up = torch.randn(num_experts, 2 * intermediate, hidden, generator=generator)
    down = torch.randn(num_experts, hidden, intermediate, generator=generator)
    return ExpertWeights(gate_up * hidden**-0.5, down * intermediate**-0.5)


def make_tokens(
    num_rows: int, num_columns: int, *, hidden: int, num_experts: int, absent: float
) -> DispatchedTokens:
    """Distinct local experts per row in random order; a share of the choices lives elsewhere."""
    generator = torch.Generator().manual_seed(3)
    order = torch.rand(num_rows, num_experts, generator=generator).argsort(dim=-1)
    elsewhere = torch.rand(num_rows, num_columns, generator=generator) < absent
    weights = torch.rand(num_rows, num_columns, generator=generator)
    return DispatchedTokens(
        x=torch.randn(num_rows, hidden, generator=generator),
        expert_ids=order[:, :num_columns].masked_fill(elsewhere, -1),
        expert_weights=weights.masked_fill(elsewhere, 0.0),
        handle=None,
    )


def with_expert_ids(tokens: DispatchedTokens, expert_ids: Tensor) -> DispatchedTokens:
    return DispatchedTokens(tokens.x, expert_ids, tokens.expert_weights, tokens.handle)


@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("absent", [0.0, 0.6])
@pytest.mark.parametrize(("hidden", "intermediate"), [(16, 8), (18, 6)])
def test_grouped_experts_equal_the_loop(
    numerics: Numerics, num_rows: int, absent: float, hidden: int, intermediate: int
) -> None:
    weights = make_weights(6, hidden, intermediate)
    tokens = make_tokens(num_rows, 4, hidden=hidden, num_experts=6, absent=absent)
    y = run_experts(tokens, weights, numerics)
    torch.testing.assert_close(y, loop_experts(tokens, weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
def test_rows_without_local_experts_are_zero(numerics: Numerics) -> None:
    tokens = make_tokens(5, 2, hidden=16, num_experts=4, absent=0.0)
    expert_ids = tokens.expert_ids.clone()
    expert_ids[3] = -1
    y = run_experts(with_expert_ids(tokens, expert_ids), make_weights(4, 16, 8), numerics)
    assert y[3].eq(0).all()
    assert y[[0, 1, 2, 4]].ne(0).any(dim=-1).all()


@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
@pytest.mark.parametrize("num_rows", [0, 3])
def test_nothing_to_do_gives_zero_rows_of_the_same_width(numerics: Numerics, num_rows: int) -> None:
    tokens = make_tokens(num_rows, 2, hidden=16, num_experts=4, absent=1.1)
    y = run_experts(tokens, make_weights(4, 16, 8), numerics)
    assert y.shape == (num_rows, 16)
    assert y.dtype == tokens.x.dtype
    assert y.eq(0).all()


def test_order_of_the_choices_does_not_change_a_byte() -> None:
    tokens = make_tokens(30, 4, hidden=16, num_experts=8, absent=0.0)
    flipped = DispatchedTokens(
        tokens.x, tokens.expert_ids.flip(1), tokens.expert_weights.flip(1), tokens.handle
    )
    weights = make_weights(8, 16, 8)
    assert torch.equal(
        run_experts(tokens, weights, DeterministicNumerics()),
        run_experts(flipped, weights, DeterministicNumerics()),
    )


def test_deterministic_rows_do_not_depend_on_their_neighbours() -> None:
    tokens = make_tokens(60, 3, hidden=16, num_experts=5, absent=0.3)
    weights, numerics = make_weights(5, 16, 8), DeterministicNumerics()
    whole = run_experts(tokens, weights, numerics)
    alone = [
        run_experts(
            DispatchedTokens(
                tokens.x[i : i + 1],
                tokens.expert_ids[i : i + 1],
                tokens.expert_weights[i : i + 1],
                None,
            ),
            weights,
            numerics,
        )
        for i in range(60)
    ]
    assert torch.equal(torch.cat(alone), whole)


@pytest.mark.parametrize("numerics", NUMERICS, ids=NAMES)
def test_a_row_of_nan_stays_alone(numerics: Numerics) -> None:
    tokens = make_tokens(6, 2, hidden=16, num_experts=4, absent=0.0)
    weights = make_weights(4, 16, 8)
    clean = run_experts(tokens, weights, numerics)
    x = tokens.x.clone()
    x[0] = float("nan")
    y = run_experts(
        DispatchedTokens(x, tokens.expert_ids, tokens.expert_weights, None), weights, numerics
    )
    assert torch.equal(y[1:], clean[1:])
    assert y[0].isnan().all()
