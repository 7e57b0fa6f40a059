"""top_k, min_p and barred ids: against a plain twin, statistically, and at their borders."""

import numpy as np
import pytest
import torch
from torch import Tensor

from expert_workers.sampler import RowSampling, sample, uniform
from tests.reference.plain_sampler import plain_distribution, plain_draw

VOCAB_SIZE = 40
PROBABILITIES = [0.05, 0.4, 0.3, 0.15, 0.1]


def row(position: int = 5, **changes: object) -> RowSampling:
    values: dict[str, object] = {"temperature": 1.0, "top_p": 1.0, "seed": 7}
    return RowSampling(**{**values, **changes}, choice=0, position=position)


def random_case(number: int) -> tuple[Tensor, RowSampling]:
    """Logits with many exact ties, and any mixture of parameters."""
    rng = np.random.default_rng(number)
    logits = np.round(rng.normal(0, 3, VOCAB_SIZE)).astype(np.float32)
    sampling = row(
        position=number,
        seed=int(rng.integers(2**63)),
        temperature=float(rng.uniform(0.2, 2.0)),
        top_k=[None, 1, 2, 7, VOCAB_SIZE, 10**6][rng.integers(6)],
        top_p=[1.0, 0.95, 0.5, 1e-6][rng.integers(4)],
        min_p=[0.0, 0.013, 0.37, 1.0][rng.integers(4)],
        barred_token_ids=tuple(rng.permutation(VOCAB_SIZE)[: rng.integers(0, 6)].tolist()),
    )
    return torch.from_numpy(logits), sampling


def expected_token(logits: Tensor, sampling: RowSampling) -> int:
    distribution = plain_distribution(
        logits.numpy(),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        barred_token_ids=sampling.barred_token_ids,
    )
    number = uniform(sampling.seed, sampling.choice, sampling.position)
    return plain_draw(distribution, logits.numpy(), number)


def drawn_ids(num_draws: int, **changes: object) -> list[int]:
    logits = torch.tensor(PROBABILITIES).log().expand(num_draws, -1)
    return sample(logits, [row(position, **changes) for position in range(num_draws)]).token_ids


def frequencies(num_draws: int, **changes: object) -> np.ndarray:
    counts = np.bincount(drawn_ids(num_draws, **changes), minlength=len(PROBABILITIES))
    return counts / num_draws


def test_rows_of_any_parameters_draw_what_a_plain_twin_draws() -> None:
    cases = [random_case(number) for number in range(400)]
    logits = torch.stack([logits for logits, _ in cases])
    answer = sample(logits, [sampling for _, sampling in cases])
    assert answer.token_ids == [expected_token(*case) for case in cases]


def test_a_row_of_any_parameters_does_not_depend_on_its_neighbours() -> None:
    cases = [random_case(number) for number in range(40)]
    together = sample(torch.stack([c[0] for c in cases]), [c[1] for c in cases]).token_ids
    alone = [sample(logits[None], [sampling]).token_ids[0] for logits, sampling in cases]
    assert together == alone


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 3},
        {"min_p": 0.26},
        {"top_k": 4, "top_p": 0.8},
        {"min_p": 0.2, "top_p": 0.8, "temperature": 1.4},
        {"barred_token_ids": (1,), "top_k": 2},
    ],
)
def test_frequencies_match_the_exact_distribution(changes: dict[str, object]) -> None:
    rules = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0, **changes}
    exact = plain_distribution(np.log(PROBABILITIES), **rules)
    observed = frequencies(4_000, **changes)
    assert (observed[exact == 0.0] == 0.0).all()
    assert np.abs(observed - exact).max() < 0.025  # over 3 standard deviations


def test_top_k_keeps_the_lower_ids_of_equally_likely_tokens() -> None:
    logits = torch.zeros(200, 6)
    answer = sample(logits, [row(position, top_k=2) for position in range(200)])
    assert set(answer.token_ids) == {0, 1}


def test_top_k_of_one_is_greedy() -> None:
    assert set(drawn_ids(50, top_k=1, temperature=2.0)) == {1}


def test_a_top_k_beyond_the_vocabulary_changes_nothing() -> None:
    assert drawn_ids(300, top_k=10**9) == drawn_ids(300)


def test_top_p_counts_the_mass_of_what_top_k_left() -> None:
    """0.4 of 0.85 is over 0.47; of the whole it is under."""
    assert set(drawn_ids(300, top_k=3, top_p=0.47)) == {1}
    assert set(drawn_ids(300, top_p=0.47)) == {1, 2}


def test_min_p_is_measured_at_the_temperature_of_the_row() -> None:
    """0.1 / 0.4 is 0.25; at temperature 2 it is 0.5."""
    assert 4 not in drawn_ids(400, min_p=0.3)
    assert 4 in drawn_ids(400, min_p=0.3, temperature=2.0)


def test_min_p_of_one_keeps_the_most_likely_alone() -> None:
    assert set(drawn_ids(100, min_p=1.0)) == {1}


def test_greedy_takes_the_largest_logit_that_is_not_barred() -> None:
    logits = torch.zeros(1, 9)
    logits[0, [2, 4, 6]] = torch.tensor([3.0, 2.0, 2.0])
    assert sample(logits, [row(temperature=0.0, barred_token_ids=(2,))]).token_ids == [4]


def test_a_barred_id_is_never_drawn_though_all_but_certain() -> None:
    logits = torch.zeros(100, 5)
    logits[:, 3] = 50.0
    answer = sample(logits, [row(p, barred_token_ids=(3,)) for p in range(100)])
    assert set(answer.token_ids) == {0, 1, 2, 4}
    assert answer.poisoned == [False] * 100


def test_the_logits_of_a_row_with_barred_ids_stay_as_they_are() -> None:
    logits = torch.arange(5.0)[None]
    sample(logits, [row(barred_token_ids=(1, 4))])
    assert logits.tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]]


def test_barring_the_only_bad_logit_does_not_hide_it() -> None:
    logits = torch.zeros(1, 5)
    logits[0, 2] = float("nan")
    assert sample(logits, [row(temperature=0.0, barred_token_ids=(2,))]).poisoned == [True]
