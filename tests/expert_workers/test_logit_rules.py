"""Penalties, biases, allowed ids and bad words: against a plain twin, and each by a hand-made example."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.logit_rules import NO_RULES, LogitRules
from expert_workers.logit_rules import NO_PAST, PastTokens, apply_rules
from expert_workers.sampler import RowSampling, sample, uniform
from tests.reference.plain_sampler import plain_distribution, plain_draw, plain_logits

VOCAB_SIZE = 12
LOGITS = torch.tensor([2.0, -2.0, 1.0, 0.0, 4.0, -1.0])
token_ids = st.integers(0, VOCAB_SIZE - 1)
penalties = st.sampled_from([0.0, 0.5, 2.0, -1.25, 0.1])


def past_of(prompt: list[int], output: list[int]) -> PastTokens:
    return PastTokens(np.array(prompt, np.int32), np.array(output, np.int32))


def ruled(prompt: list[int], output: list[int], **rules: Any) -> list[float]:
    return apply_rules(LOGITS, LogitRules(**rules), past_of(prompt, output)).tolist()


@st.composite
def any_rules(draw: st.DrawFn) -> LogitRules:
    biases = draw(st.dictionaries(token_ids, st.sampled_from([-100.0, -1.5, 0.25, 100.0])))
    words = draw(st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=3))
    allowed = st.sets(token_ids, min_size=4).map(lambda ids: tuple(sorted(ids)))
    return LogitRules(
        allowed_token_ids=draw(st.none() | allowed),
        bad_words=tuple(map(tuple, words)),
        biased_token_ids=tuple(biases),
        biases=tuple(biases.values()),
        repetition_penalty=draw(st.sampled_from([1.0, 1.1, 2.0, 0.5])),
        frequency_penalty=draw(penalties),
        presence_penalty=draw(penalties),
    )


def logits_of(seed: int) -> Tensor:
    """With exact ties and zeros."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.round(rng.normal(0, 3, VOCAB_SIZE)).astype(np.float32))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    rules=any_rules(),
    prompt=st.lists(token_ids, max_size=8),
    output=st.lists(token_ids, max_size=20),
    temperature=st.sampled_from([0.0, 0.7, 1.6]),
)
def test_a_row_under_any_rules_draws_what_a_plain_twin_draws(
    seed: int, rules: LogitRules, prompt: list[int], output: list[int], temperature: float
) -> None:
    logits = logits_of(seed)
    row = RowSampling(
        temperature,
        top_p=0.95,
        seed=seed,
        choice=1,
        position=len(prompt) + len(output),
        top_k=9,
        min_p=0.001,
        rules=rules,
        past=past_of(prompt, output),
    )
    expected = plain_logits(logits.numpy(), rules, prompt, output)
    np.testing.assert_array_equal(apply_rules(logits, rules, row.past).numpy(), expected)
    if not np.isfinite(expected).any():
        return
    if temperature == 0.0:
        token_id = int(expected.argmax())
    else:
        distribution = plain_distribution(
            expected, temperature=temperature, top_k=9, top_p=0.95, min_p=0.001
        )
        number = uniform(row.seed, row.choice, row.position)
        token_id = plain_draw(distribution, expected, number)
    assert sample(logits[None], [row]).token_ids == [token_id]


def test_the_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    """Of ids in the prompt and in the output, once each."""
    answer = ruled([0, 0, 1], [4, 4], repetition_penalty=2.0)
    assert answer == [1.0, -4.0, 1.0, 0.0, 2.0, -1.0]


def test_the_frequency_penalty_counts_generated_tokens_alone() -> None:
    assert ruled([0, 1], [4, 4, 2], frequency_penalty=0.5) == [2.0, -2.0, 0.5, 0.0, 3.0, -1.0]


def test_the_presence_penalty_is_taken_once() -> None:
    assert ruled([0, 1], [4, 4, 2], presence_penalty=0.5) == [2.0, -2.0, 0.5, 0.0, 3.5, -1.0]


def test_negative_penalties_make_repetition_likelier() -> None:
    answer = ruled([], [5], presence_penalty=-2.0, frequency_penalty=-0.5)
    assert answer[5] == 1.5


def test_the_bias_comes_before_the_repetition_penalty() -> None:
    answer = ruled([1], [], biased_token_ids=(1,), biases=(3.0,), repetition_penalty=2.0)
    assert answer[1] == 0.5


def test_a_bad_word_is_barred_at_its_last_token_only_after_the_others() -> None:
    word = (2, 3, 4)
    assert ruled([], [0, 2, 3], bad_words=(word,))[4] == -math.inf
    assert ruled([2, 3], [], bad_words=(word,))[4] == 4.0
    assert ruled([], [3], bad_words=(word,))[4] == 4.0
    assert ruled([], [], bad_words=((4,),))[4] == -math.inf


def test_only_allowed_ids_remain_and_keep_their_logits() -> None:
    answer = ruled([], [], allowed_token_ids=(1, 5))
    assert answer == [-math.inf, -2.0, -math.inf, -math.inf, -math.inf, -1.0]


def test_the_logits_of_a_row_with_rules_stay_as_they_are() -> None:
    logits = LOGITS[None].clone()
    row = RowSampling(
        0.0, 1.0, 7, 0, 5, rules=LogitRules(frequency_penalty=2.0), past=past_of([], [4])
    )
    sample(logits, [row])
    assert logits.tolist() == [LOGITS.tolist()]


def test_rules_of_a_row_change_no_neighbour() -> None:
    logits = torch.stack([logits_of(seed) for seed in range(8)])
    plain = [RowSampling(1.0, 0.9, seed, 0, 5) for seed in range(8)]
    rules = LogitRules(biased_token_ids=tuple(range(6)), biases=(-100.0,) * 6)
    mixed = [replace(row, rules=rules) if i % 2 else row for i, row in enumerate(plain)]
    assert sample(logits, mixed).token_ids[::2] == sample(logits, plain).token_ids[::2]
    assert min(sample(logits, mixed).token_ids[1::2]) >= 6


def test_a_bad_logit_is_reported_though_its_id_is_not_allowed() -> None:
    logits = LOGITS[None].clone()
    logits[0, 2] = float("nan")
    row = RowSampling(0.0, 1.0, 7, 0, 5, rules=LogitRules(allowed_token_ids=(1,)))
    assert sample(logits, [row]).poisoned == [True]


@pytest.mark.parametrize(
    ("rules", "reads"),
    [
        (NO_RULES, (False, False)),
        (
            LogitRules(biased_token_ids=(1,), biases=(1.0,), allowed_token_ids=(1, 2)),
            (False, False),
        ),
        (LogitRules(presence_penalty=0.1), (False, True)),
        (LogitRules(frequency_penalty=-0.1), (False, True)),
        (LogitRules(bad_words=((1,),)), (False, True)),
        (LogitRules(repetition_penalty=1.1), (True, True)),
    ],
)
def test_rules_say_which_earlier_tokens_they_look_at(
    rules: LogitRules, reads: tuple[bool, bool]
) -> None:
    assert (rules.reads_prompt, rules.reads_output) == reads


def test_without_rules_logits_are_the_same() -> None:
    assert apply_rules(LOGITS, NO_RULES, NO_PAST).tolist() == LOGITS.tolist()
