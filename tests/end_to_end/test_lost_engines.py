"""An engine goes on with answers of a real model that another one had begun, to the byte, whatever is asked for."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.grammar import grammar_text
from cluster.logit_rules import LogitRules
from cluster.scores import ScoreColumns
from tests.helpers.engines import CLIENT, EngineHarness, Generation
from tests.helpers.lost_engines import go_on, told_until
from tests.helpers.states import ObservedRanks, observed_ranks, random_prompt
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR

PROMPT = random_prompt(37, seed=3)
MAX_TOKENS = 12
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 1234}
ASKED: dict[str, dict[str, Any]] = {
    "everything that looks back": DRAWN
    | {
        "choice": 1,
        "top_k": 200,
        "min_p": 0.001,
        "min_tokens": 7,
        "barred_token_ids": tuple(range(0, 3000, 40)),
        "rules": LogitRules(
            repetition_penalty=1.3,
            frequency_penalty=0.7,
            presence_penalty=0.4,
            biased_token_ids=(13, 200),
            biases=(15.0, 15.0),
            bad_words=((13, 13), (200, 13)),
        ),
    },
    "a grammar": DRAWN
    | {
        "rules": LogitRules(grammar=grammar_text("regex", "[a-e]{14}(-[0-9]{2}){5}")),
        "stop_token_ids": (2, 0),
    },
    "greedy with alternatives": {
        "num_top_logprobs": 4,
        "score_prompt": True,
        "num_prompt_alternatives": 3,
        "return_route_weights": True,
    },
}


@pytest.fixture(scope="module")
def observed() -> Iterator[ObservedRanks]:
    with observed_ranks(DEMO_MODEL_DIR, ep_size=1) as observed:
        yield observed


def columns(scores: ScoreColumns | None) -> list[list[float]]:
    if scores is None:
        return []
    return [getattr(scores, name).tolist() for name in ScoreColumns.__struct_fields__]


def facts(generation: Generation) -> dict[str, Any]:
    """All that the client got."""
    assert generation.completion is not None
    return {
        "token_ids": generation.token_ids,
        "scores": [columns(score) for score in generation.scores],
        "prompt_scores": columns(generation.prompt_scores),
        "expert ids": generation.routes.topk_ids.tobytes(),
        "expert weights": generation.routes.topk_weights.tobytes(),
        "completion": generation.completion,
    }


def engine(observed: ObservedRanks) -> EngineHarness:
    return observed.bench(budget=16).harness


def leave(harness: EngineHarness, request_id: str) -> None:
    """The ranks are another engine's next."""
    harness.engine.abort(CLIENT, request_id)
    harness.engine.settle()


@pytest.mark.parametrize("name", ASKED)
def test_what_an_engine_had_begun_ends_as_if_it_had_lived(
    observed: ObservedRanks, name: str
) -> None:
    whole = engine(observed)
    whole.submit("r", PROMPT, MAX_TOKENS, **ASKED[name])
    whole.run()
    num_tokens = len(whole.generations["r"].token_ids)
    for num_told in sorted(random.Random(name).sample(range(1, num_tokens), 2)):
        first = engine(observed)
        first.submit("r", PROMPT, MAX_TOKENS, **ASKED[name])
        told = told_until(first, "r", num_told)
        leave(first, "r")
        second = engine(observed)
        go_on(second, "r", PROMPT, MAX_TOKENS, told, **ASKED[name])
        second.run()
        assert facts(told) == facts(whole.generations["r"]), f"told {num_told} tokens"
