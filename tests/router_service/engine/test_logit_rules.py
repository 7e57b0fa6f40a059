"""What a rank is told of the tokens that a request's rules look at, and ids that no rank has."""

from typing import Any

import pytest

from cluster.errors import RequestError
from cluster.logit_rules import LogitRules
from cluster.worker_messages import KnownTokens
from tests.helpers.content_workers import SHAPE, VOCAB, ContentWorkers
from tests.helpers.engines import EngineHarness

PROMPT = [5, 6, 7, 8, 9]
REPETITION = LogitRules(repetition_penalty=1.1)


def harness_of(workers: ContentWorkers, **options: Any) -> EngineHarness:
    return EngineHarness(workers, SHAPE, vocab_size=VOCAB, **options)


def known_of(rules: LogitRules) -> KnownTokens | None:
    workers = ContentWorkers(1, 4)
    harness = harness_of(workers)
    harness.submit("r", PROMPT, 3, rules=rules)
    harness.run()
    (start,) = workers.starts
    assert start.rules == rules
    return start.known


def test_rules_that_look_at_the_prompt_bring_it() -> None:
    known = known_of(REPETITION)
    assert known is not None
    assert (known.num_prompt_tokens, known.first_position) == (5, 0)
    assert known.token_ids.tolist() == PROMPT


def test_rules_that_look_at_the_output_alone_bring_no_prompt() -> None:
    known = known_of(LogitRules(presence_penalty=1.0))
    assert known is not None
    assert (known.num_prompt_tokens, known.first_position) == (5, 5)
    assert known.token_ids.tolist() == []


def test_other_requests_bring_no_tokens() -> None:
    assert known_of(LogitRules(biased_token_ids=(4,), biases=(1.0,))) is None


def test_after_a_preemption_the_rank_is_told_what_was_generated_before() -> None:
    workers = ContentWorkers(1, 4)
    harness = harness_of(workers, num_kv_blocks=8, budget=8)
    harness.submit("older", [1, 2, 3, 4, 1, 2, 3, 4, 1], 20)
    harness.submit("younger", PROMPT, 20, rules=REPETITION)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    first, *later = [start.known for start in workers.starts if start.rules == REPETITION]
    assert first is not None
    everything = PROMPT + harness.generations["younger"].token_ids
    lengths = [len(known.token_ids) for known in later if known is not None]
    assert max(lengths) > len(PROMPT)
    assert [known.token_ids.tolist() for known in later if known is not None] == [
        everything[:length] for length in lengths
    ]


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        (LogitRules(allowed_token_ids=(1, VOCAB)), "allowed_token_ids"),
        (LogitRules(biased_token_ids=(-1,), biases=(1.0,)), "logit_bias"),
        (LogitRules(bad_words=((1, VOCAB),)), "bad_words"),
    ],
)
def test_the_engine_refuses_rules_with_ids_out_of_range_and_keeps_nothing(
    rules: LogitRules, field: str
) -> None:
    harness = harness_of(ContentWorkers(1, 4))
    with pytest.raises(RequestError, match=f"from 0 to {VOCAB - 1}") as refused:
        harness.submit("r", PROMPT, 2, rules=rules)
    assert refused.value.field == field
    assert not harness.engine.has_work
