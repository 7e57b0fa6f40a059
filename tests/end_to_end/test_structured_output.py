"""Output under a grammar, from a real model: it is what was asked for, however the request came to be computed."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from cluster.grammar import GrammarKind, grammar_text
from cluster.logit_rules import LogitRules
from router_service.tokenizer import TextCodec
from tests.helpers.schemas import random_schema
from tests.helpers.states import Bench, ObservedRanks, RequestRun, observed_ranks, random_prompt
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

EOS = (2, 0)
CODEC = TextCodec(DEMO_MODEL_DIR)
PROMPT = random_prompt(37, seed=3)
MAX_TOKENS = 200
REGEX = r"[a-c]{3,12}(-\d{2}){1,3}"
GREEDY: dict[str, Any] = {"temperature": 0.0}
WAYS_TO_DRAW = [GREEDY, {"temperature": 1.0, "seed": 5}]


@pytest.fixture(scope="module")
def observed() -> Iterator[ObservedRanks]:
    with observed_ranks(DEMO_MODEL_DIR, ep_size=1) as observed:
        yield observed


def rules_of(kind: GrammarKind, source: object, **rules: Any) -> LogitRules:
    text = source if isinstance(source, str) else json.dumps(source)
    return LogitRules(grammar=grammar_text(kind, text), **rules)


def asked(kind: GrammarKind, source: object, **sampling: Any) -> dict[str, Any]:
    return {"rules": rules_of(kind, source), "stop_token_ids": EOS, **sampling}


def text_of(run: RequestRun) -> str:
    """Without the end of sequence that must have ended it."""
    assert run.completion.finish_reason == "stop"
    assert run.token_ids[-1] in EOS
    detokenizer = CODEC.detokenizer()
    return "".join(map(detokenizer.add, run.token_ids)) + detokenizer.finish()


def test_answers_to_random_schemas_parse_and_validate(observed: ObservedRanks) -> None:
    """All at once, so that grammars are beside each other."""
    rng = np.random.default_rng(11)
    schemas = [random_schema(rng) for _ in range(8)]
    bench = observed.bench(budget=512)
    submitted = [
        (schema, bench.submit(PROMPT[n:], MAX_TOKENS, **asked("json", schema), **sampling))
        for n, schema in enumerate(schemas)
        for sampling in WAYS_TO_DRAW
    ]
    bench.finish()
    for schema, seq_id in submitted:
        value = json.loads(text_of(bench.run_of(seq_id)))
        assert jsonschema_rs.validator_for(schema).is_valid(value)


def test_answers_match_a_regex_a_choice_and_a_grammar(observed: ObservedRanks) -> None:
    bench = observed.bench(budget=512)
    cases: list[tuple[GrammarKind, object, str]] = [
        ("regex", REGEX, REGEX),
        ("choice", ["Berlin", "a b", "né"], "Berlin|a b|né"),
        ("grammar", 'start: x x\nx: "(" /[a-c]{1,3}/ ")"', r"(\([a-c]{1,3}\)){2}"),
        ("grammar", 'root ::= "a" n\nn ::= [0-4] [5-9]', "a[0-4][5-9]"),
    ]
    submitted = [
        (pattern, bench.submit(PROMPT, MAX_TOKENS, **asked(kind, source), **sampling))
        for kind, source, pattern in cases
        for sampling in WAYS_TO_DRAW
    ]
    bench.finish()
    for pattern, seq_id in submitted:
        assert re.fullmatch(pattern, text_of(bench.run_of(seq_id)))


def test_any_object_is_json_or_ends_for_length_alone(observed: ObservedRanks) -> None:
    run = observed.bench(budget=512).generate(PROMPT, 12, **asked("json", {"type": "object"}))
    assert run.completion.finish_reason in ("stop", "length")
    detokenizer = CODEC.detokenizer()
    assert "".join(map(detokenizer.add, run.token_ids)).startswith("{")


def crowded(observed: ObservedRanks) -> Bench:
    """An older request grows until the blocks do not suffice for both, and the younger has to go."""
    bench = observed.bench(budget=512, num_kv_blocks=4)
    bench.submit(random_prompt(12, seed=0), 30)
    return bench


@pytest.mark.parametrize("sampling", WAYS_TO_DRAW, ids=["greedy", "drawn"])
def test_cold_cached_replayed_and_preempted_answers_are_the_same(
    observed: ObservedRanks, sampling: dict[str, Any]
) -> None:
    fields = asked("regex", "[a-e]{14}", **sampling)
    bench = observed.bench(budget=512)
    cold = bench.generate(PROMPT, 20, **fields)
    cached = bench.generate(PROMPT, 20, **fields)
    bench.harness.engine.evict("kv")
    replayed = bench.generate(PROMPT, 20, **fields)
    crowd = crowded(observed)
    preempted = crowd.generate(PROMPT, 20, **fields)
    assert cached.completion.cached_tokens > 0
    assert replayed.completion.replayed_tokens > 0
    assert crowd.num_preemptions > 0
    assert re.fullmatch("[a-e]{14}", text_of(cold))
    assert cached.token_ids == replayed.token_ids == preempted.token_ids == cold.token_ids


def test_choices_of_one_prompt_each_follow_the_grammar(observed: ObservedRanks) -> None:
    bench = observed.bench(budget=512)
    fields = asked("regex", REGEX, temperature=1.0, seed=9)
    ids = [
        bench.submit(PROMPT, 60, choice=choice, leader_id="r0" if choice else None, **fields)
        for choice in range(3)
    ]
    bench.finish()
    texts = [text_of(bench.run_of(seq_id)) for seq_id in ids]
    assert [text for text in texts if not re.fullmatch(REGEX, text)] == []
    assert len(set(texts)) > 1


def test_a_neighbour_without_grammar_is_answered_as_alone(observed: ObservedRanks) -> None:
    alone = observed.bench(budget=512).generate(PROMPT, 10).token_ids
    bench = observed.bench(budget=512)
    bench.submit(PROMPT[5:], 20, **asked("regex", REGEX))
    assert bench.generate(PROMPT, 10).token_ids == alone


def test_a_grammar_that_has_ended_ends_the_answer_before_min_tokens(
    observed: ObservedRanks,
) -> None:
    run = observed.bench(budget=512).generate(
        PROMPT, 20, min_tokens=15, barred_token_ids=EOS, **asked("regex", "[0-9]{2}")
    )
    assert re.fullmatch("[0-9]{2}", text_of(run))


def test_min_tokens_keep_a_grammar_going_that_could_end(observed: ObservedRanks) -> None:
    run = observed.bench(budget=512).generate(
        PROMPT, 40, min_tokens=15, barred_token_ids=EOS, **asked("regex", "[0-9]*")
    )
    assert len(run.token_ids) >= 15


def test_a_grammar_that_fails_on_the_rank_ends_its_request_alone(observed: ObservedRanks) -> None:
    bench = observed.bench(budget=512)
    neighbour = bench.submit(PROMPT[3:], 10)
    broken = bench.submit(PROMPT, 10, rules=LogitRules(grammar="start: missing"))
    bench.finish()
    completion = bench.run_of(broken).completion
    assert completion.finish_reason == "error"
    assert completion.error is not None
    assert "structured output cannot go on" in completion.error
    assert completion.is_at_fault
    assert bench.run_of(neighbour).completion.finish_reason == "length"
    assert len(bench.generate(PROMPT, 5).token_ids) == 5


def test_penalties_choose_among_what_the_grammar_lets_come(observed: ObservedRanks) -> None:
    rules = rules_of("regex", "[a-e]{14}", frequency_penalty=2.0)
    run = observed.bench(budget=512).generate(PROMPT, 20, rules=rules, stop_token_ids=EOS)
    assert re.fullmatch("[a-e]{14}", text_of(run))


def test_scores_are_those_of_the_raw_logits(observed: ObservedRanks) -> None:
    bench = observed.bench(budget=512)
    run = bench.generate(PROMPT, 20, **asked("regex", "[0-9]{5}"))
    likeliest = [int(score.top_ids[0]) for score in bench.harness.generations["r0"].scores]
    assert likeliest == run.logits()[len(PROMPT) - 1 :].argmax(axis=1).tolist()
    assert likeliest != run.token_ids
