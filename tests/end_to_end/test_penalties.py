"""Rules that look back at tokens give the same answer however the request came to be computed."""

from collections.abc import Callable, Iterator

import pytest

from cluster.logit_rules import LogitRules
from tests.helpers.states import Bench, ObservedRanks, observed_ranks, random_prompt
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR
from tests.reference.plain_sampler import plain_logits

PROMPT = random_prompt(37, seed=3)
MAX_TOKENS = 14
LIKELY = (13, 200)
RULES = LogitRules(
    repetition_penalty=1.3,
    frequency_penalty=0.7,
    presence_penalty=0.4,
    biased_token_ids=LIKELY,
    biases=(15.0, 15.0),
    bad_words=((13, 13), (200,)),
)
WAYS_TO_DRAW = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "seed": 5}]


@pytest.fixture(scope="module", params=[1, 2])
def observed(request: pytest.FixtureRequest) -> Iterator[ObservedRanks]:
    with observed_ranks(DEMO_MODEL_DIR, ep_size=request.param) as observed:
        yield observed


def cold(observed: ObservedRanks, **sampling: object) -> list[int]:
    return observed.bench(budget=512).generate(PROMPT, MAX_TOKENS, **sampling).token_ids


def from_cache(observed: ObservedRanks) -> Bench:
    bench = observed.bench(budget=512)
    bench.generate(PROMPT, 1)
    return bench


def replayed(observed: ObservedRanks) -> Bench:
    bench = from_cache(observed)
    bench.harness.engine.evict("kv")
    return bench


def in_chunks(observed: ObservedRanks) -> Bench:
    return observed.bench(budget=5)


def crowded(observed: ObservedRanks) -> Bench:
    """An older request grows until the blocks do not suffice for both, and the younger has to go."""
    bench = observed.bench(budget=512, num_kv_blocks=4)
    for rank in range(observed.ranks.options.ep_size):
        bench.submit(random_prompt(12, seed=rank), 30)
    return bench


@pytest.mark.parametrize("sampling", WAYS_TO_DRAW, ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "way", [from_cache, replayed, in_chunks, crowded], ids=lambda way: way.__name__
)
def test_the_answer_is_that_of_a_cold_run(
    observed: ObservedRanks,
    way: Callable[[ObservedRanks], Bench],
    sampling: dict[str, float],
) -> None:
    bench = way(observed)
    run = bench.generate(PROMPT, MAX_TOKENS, rules=RULES, **sampling)
    assert run.token_ids == cold(observed, rules=RULES, **sampling)
    assert (bench.num_preemptions > 0) == (way is crowded)
    assert (run.completion.cached_tokens > 0) == (way is from_cache)


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.3])
def test_greedy_tokens_are_the_largest_logits_of_a_plain_twin(
    observed: ObservedRanks, repetition_penalty: float
) -> None:
    rules = LogitRules(
        repetition_penalty=repetition_penalty, frequency_penalty=0.7, presence_penalty=0.4
    )
    run = observed.bench(budget=512).generate(PROMPT, MAX_TOKENS, rules=rules)
    logits = run.logits()[len(PROMPT) - 1 :]
    expected = [
        int(plain_logits(row, rules, PROMPT, run.token_ids[:place]).argmax())
        for place, row in enumerate(logits)
    ]
    assert run.token_ids == expected
    assert run.token_ids != cold(observed)


def test_choices_of_one_prompt_each_look_back_at_their_own_tokens(observed: ObservedRanks) -> None:
    def together(num_choices: int) -> list[list[int]]:
        bench = observed.bench(budget=512)
        fields = {"temperature": 1.0, "seed": 9, "rules": RULES}
        ids = [
            bench.submit(
                PROMPT, MAX_TOKENS, choice=choice, leader_id="r0" if choice else None, **fields
            )
            for choice in range(num_choices)
        ]
        bench.finish()
        return [bench.run_of(seq_id).token_ids for seq_id in ids]

    choices = together(3)
    assert choices[:1] == together(1)
    assert len({tuple(tokens) for tokens in choices}) == 3


def test_scores_are_those_of_the_raw_logits(observed: ObservedRanks) -> None:
    bench = observed.bench(budget=512)
    run = bench.generate(PROMPT, MAX_TOKENS, rules=RULES)
    scores = bench.harness.generations["r0"].scores
    rows = run.logits()[len(PROMPT) - 1 :]
    likeliest = [int(score.top_ids[0]) for score in scores]
    assert likeliest == rows.argmax(axis=1).tolist()
    assert likeliest != run.token_ids


def test_a_request_without_rules_is_the_same_beside_one_with_rules(
    observed: ObservedRanks,
) -> None:
    alone = cold(observed)
    bench = observed.bench(budget=512)
    bench.submit(random_prompt(20, seed=1), MAX_TOKENS, rules=RULES)
    assert bench.generate(PROMPT, MAX_TOKENS).token_ids == alone
