"""Drawing tokens: greedy, top-p, keys, and rows that mean nothing."""

import numpy as np
import pytest
import torch
from torch import Tensor

from expert_workers.sampler import RowSampling, sample, uniform


def row(
    temperature: float = 1.0, top_p: float = 1.0, seed: int = 7, position: int = 5
) -> RowSampling:
    return RowSampling(temperature, top_p, seed, choice=0, position=position)


def make_logits(num_rows: int, vocab_size: int = 50) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(3)) * 3


def drawn(probabilities: list[float], sampling: RowSampling) -> int:
    return sample(torch.tensor([probabilities]).log(), [sampling]).token_ids[0]


def frequencies(probabilities: list[float], top_p: float, num_draws: int) -> np.ndarray:
    logits = torch.tensor(probabilities).log().expand(num_draws, -1)
    rows = [row(top_p=top_p, position=position) for position in range(num_draws)]
    counts = np.bincount(sample(logits, rows).token_ids, minlength=len(probabilities))
    return counts / num_draws


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = make_logits(4)
    assert sample(logits, [row(temperature=0.0)] * 4).token_ids == logits.argmax(dim=-1).tolist()


def test_greedy_takes_the_lowest_id_of_exact_ties() -> None:
    logits = torch.zeros(1, 3000)
    logits[0, [70, 1500, 2999]] = 4.0
    assert sample(logits, [row(temperature=0.0)]).token_ids == [70]


def test_no_rows_draw_nothing() -> None:
    assert sample(torch.zeros(0, 9), []).token_ids == []


@pytest.mark.parametrize("top_p", [0.8, 1.0])
def test_a_rows_token_does_not_depend_on_its_neighbours(top_p: float) -> None:
    logits = make_logits(20)
    rows = [row(top_p=top_p, seed=100 + i, position=i) for i in range(20)]
    together = sample(logits, rows).token_ids
    alone = [sample(logits[i : i + 1], [rows[i]]).token_ids[0] for i in range(20)]
    backwards = sample(logits.flip(0), rows[::-1]).token_ids[::-1]
    assert together == alone == backwards
    assert together != logits.argmax(dim=-1).tolist()


def test_a_step_issued_twice_draws_the_same_tokens() -> None:
    logits = make_logits(20)
    rows = [row(position=i) for i in range(20)]
    assert sample(logits, rows) == sample(logits, rows)


def test_seed_choice_and_position_each_change_the_number() -> None:
    numbers = {uniform(s, c, p) for s in (0, 1, -1, 2**63) for c in (0, 1) for p in (0, 1, 4095)}
    assert len(numbers) == 24
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_the_number_of_a_key_never_changes() -> None:
    assert uniform(seed=1234, choice=0, position=17) == 0.7829912072518975


def test_frequencies_match_the_exact_distribution() -> None:
    probabilities = [0.05, 0.4, 0.3, 0.15, 0.1]
    observed = frequencies(probabilities, top_p=1.0, num_draws=20_000)
    assert np.abs(observed - probabilities).max() < 0.012  # over 3 standard deviations


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    observed = frequencies([0.05, 0.4, 0.3, 0.15, 0.1], top_p=0.75, num_draws=5_000)
    assert observed[[0, 4]].tolist() == [0.0, 0.0]
    exact = np.array([0.4, 0.3, 0.15]) / 0.85
    assert np.abs(observed[1:4] - exact).max() < 0.025


def test_top_p_keeps_the_lower_ids_of_equally_likely_tokens() -> None:
    observed = frequencies([0.25, 0.25, 0.25, 0.25], top_p=0.5, num_draws=500)
    assert observed[:2].min() > 0.4
    assert observed[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("top_p", [1e-9, 0.3])
def test_top_p_keeps_at_least_one_token(top_p: float) -> None:
    assert {drawn([0.2, 0.5, 0.3], row(top_p=top_p, position=p)) for p in range(50)} == {1}


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.tensor([[0.0, 0.0, -1e9]])
    tokens = {sample(logits, [row(position=p)]).token_ids[0] for p in range(200)}
    assert tokens == {0, 1}


def test_a_tiny_temperature_is_greedy_and_stays_finite() -> None:
    logits = make_logits(1)
    token_ids = sample(logits, [row(temperature=1e-300)]).token_ids
    assert token_ids == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_a_logit_that_is_not_finite_are_reported(bad: float, temperature: float) -> None:
    logits = make_logits(3)
    logits[1, 4] = bad
    clean = sample(make_logits(3), [row(temperature=temperature)] * 3)
    answer = sample(logits, [row(temperature=temperature)] * 3)
    assert answer.poisoned == [False, True, False]
    assert answer.token_ids[::2] == clean.token_ids[::2]
