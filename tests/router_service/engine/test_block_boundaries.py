"""Lengths around the border of a block: what is found, what is replayed, and the output of an undisturbed run."""

import pytest

from tests.helpers.content_engine import assert_undisturbed, make_harness, make_prompt
from tests.helpers.content_workers import VOCAB
from tests.helpers.engines import Generation

B = 4


def sources(generation: Generation) -> tuple[int, int]:
    """Prompt tokens cached and replayed."""
    completion = generation.completion
    assert completion is not None
    return completion.cached_tokens, completion.replayed_tokens


@pytest.mark.parametrize(
    ("length", "again", "longer", "longer_again"),
    [
        (B - 1, (0, 0), (0, 0), (0, B)),
        (B, (0, B), (B, 0), (B, 0)),
        (B + 1, (B, 0), (B, 0), (B, 0)),
        (2 * B, (B, B), (2 * B, 0), (2 * B, 0)),
        (2 * B + 1, (2 * B, 0), (2 * B, 0), (2 * B, 0)),
    ],
)
def test_a_prompt_and_one_that_is_a_token_longer_find_exactly_the_full_blocks_before_their_last_token(
    length: int, again: tuple[int, int], longer: tuple[int, int], longer_again: tuple[int, int]
) -> None:
    harness = make_harness(block_size=B)
    short, long = make_prompt(length), [*make_prompt(length), 7]
    expected = [(short, (0, 0)), (short, again), (long, longer), (long, longer_again)]
    for number, (prompt, found) in enumerate(expected):
        generation = harness.generate(f"r{number}", prompt, 1)
        assert_undisturbed(generation, prompt, 1)
        assert sources(generation) == found


@pytest.mark.parametrize("extra", [0, 1, B - 1])
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3])
def test_of_what_two_prompts_share_the_second_takes_the_full_blocks(
    num_blocks: int, extra: int
) -> None:
    harness = make_harness(block_size=B)
    first = make_prompt(5 * B)
    num_shared = num_blocks * B + extra
    second = [*first[:num_shared], *((token + 1) % VOCAB for token in first[num_shared:])]
    assert_undisturbed(harness.generate("first", first, 3), first, 3)
    generation = harness.generate("second", second, 3)
    assert_undisturbed(generation, second, 3)
    assert sources(generation) == (num_blocks * B, 0)
    assert_undisturbed(harness.generate("first again", first, 3), first, 3)
