"""The model's own end-of-sequence and stop ids, before and after min_tokens."""

from collections.abc import Iterator

import pytest

from tests.helpers.states import ObservedRanks, observed_ranks, random_prompt
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

PROMPT = random_prompt(21, seed=5)
MAX_TOKENS = 10
WAYS = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}]


@pytest.fixture(scope="module")
def observed() -> Iterator[ObservedRanks]:
    with observed_ranks(DEMO_MODEL_DIR, ep_size=1) as observed:
        yield observed


@pytest.mark.parametrize("sampling", WAYS, ids=["greedy", "drawn"])
def test_stop_ids_cannot_come_before_min_tokens_and_end_the_answer_after(
    observed: ObservedRanks, sampling: dict[str, float]
) -> None:
    free = observed.bench(budget=512).generate(PROMPT, MAX_TOKENS, **sampling).token_ids
    stop_ids = tuple(dict.fromkeys(free))
    held = observed.bench(budget=512).generate(
        PROMPT,
        MAX_TOKENS,
        stop_token_ids=stop_ids,
        min_tokens=4,
        barred_token_ids=stop_ids,
        **sampling,
    )
    assert set(held.token_ids[:4]).isdisjoint(stop_ids)
    assert len(held.token_ids) >= 4


@pytest.mark.parametrize("sampling", WAYS, ids=["greedy", "drawn"])
def test_a_stop_id_is_barred_up_to_min_tokens_and_not_beyond(
    observed: ObservedRanks, sampling: dict[str, float]
) -> None:
    """The id does not come earlier in a free run, so up to its place barring it changes nothing."""
    free = observed.bench(budget=512).generate(PROMPT, MAX_TOKENS, **sampling).token_ids
    place = next(n for n in range(3, MAX_TOKENS) if free[n] not in free[:n])
    ids = (free[place],)

    def generate(min_tokens: int) -> list[int]:
        fields = {"stop_token_ids": ids, "barred_token_ids": ids, "min_tokens": min_tokens}
        return (
            observed.bench(budget=512).generate(PROMPT, MAX_TOKENS, **fields, **sampling).token_ids
        )

    assert generate(place) == free[: place + 1]
    later = generate(place + 1)
    assert later[:place] == free[:place]
    assert later[place] != free[place]


def test_with_min_tokens_of_all_tokens_none_is_a_stop_id(observed: ObservedRanks) -> None:
    barred = tuple(range(0, 3000, 2))
    run = observed.bench(budget=512).generate(
        PROMPT, MAX_TOKENS, min_tokens=MAX_TOKENS, barred_token_ids=barred, stop_token_ids=barred
    )
    assert set(run.token_ids).isdisjoint(barred)
    assert run.completion.finish_reason == "length"
