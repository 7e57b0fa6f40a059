"""Tenants: all of a prompt's KV, routes, plans and scores within a salt, nothing of it in another."""

from typing import Any

import pytest

from tests.integration.api import CellApi, random_prompt, source_of

pytestmark = pytest.mark.ray
NUM_TOKENS = 160
BLOCKS = 144
"""A KV hit stops before the last prompt token, and so at a block border."""


def ask(api: CellApi, prompt: list[int], salt: str | None, **fields: Any) -> tuple[Any, float]:
    """The answer and how many tokens met a gate for it."""
    before = api.metric("gate_tokens_total")
    answer = api.complete(prompt, 1, cache_salt=salt, **fields)
    return answer, api.metric("gate_tokens_total") - before


def test_kv_is_reused_within_a_salt_in_full_and_never_across(api: CellApi) -> None:
    prompt = random_prompt(91, NUM_TOKENS)
    asked = [ask(api, prompt, salt) for salt in ("a", "b", None, "a", "b", None, "A", "a ")]
    assert [source_of(answer)[0] for answer, _ in asked] == [0] * 3 + [BLOCKS] * 3 + [0, 0]
    assert [gated for _, gated in asked] == [NUM_TOKENS] * 3 + [0] * 3 + [NUM_TOKENS] * 2
    assert len({answer["choices"][0]["text"] for answer, _ in asked}) == 1


def test_routes_are_replayed_within_a_salt_and_gated_in_another(api: CellApi) -> None:
    prompt = random_prompt(92, NUM_TOKENS)
    ask(api, prompt, "a")
    api.evict("kv")
    before = api.metrics()
    (other, gated), (same, replayed) = ask(api, prompt, "b"), ask(api, prompt, "a")
    assert (source_of(other), gated) == ((0, 0), NUM_TOKENS)
    assert (source_of(same), replayed) == ((0, NUM_TOKENS), 0)
    rise = api.rise_since(before)
    ways = ("negotiated", "planned")
    assert sum(rise["pointsman_replayed_tokens_total", (way,)] for way in ways) == NUM_TOKENS


def test_scores_are_those_of_a_salt(api: CellApi) -> None:
    prompt = random_prompt(93, NUM_TOKENS)
    fields = {"echo": True, "logprobs": 1}
    logprobs, gated = [], []
    for salt in ("a", "b", None):
        first, first_gated = ask(api, prompt, salt, **fields)
        steps = api.status()["steps_total"]
        again = api.complete(prompt, 0, cache_salt=salt, **fields)
        assert api.status()["steps_total"] == steps  # all of it is known
        gated.append(first_gated)
        for answer in (first, again):
            token_logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
            logprobs.append(token_logprobs[:NUM_TOKENS])
    assert gated == [NUM_TOKENS] * 3
    assert logprobs == [logprobs[0]] * 6


@pytest.mark.parametrize("salt", ["", 5, True, ["a"], {"a": 1}])
def test_what_is_no_salt_is_a_400_that_names_the_field(api: CellApi, salt: Any) -> None:
    body = {"model": "minnow", "prompt": [1], "cache_salt": salt}
    answer = api.http.post(f"{api.base_url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"
