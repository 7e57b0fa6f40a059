"""Several choices of one prompt from a real cell: different ends, one prompt, each what it would be alone."""

import json
from typing import Any

import numpy as np
import pytest

from tests.integration.answers import EVERYTHING, answer_of
from tests.integration.api import CellApi, completion_body, random_prompt

pytestmark = pytest.mark.ray
ENDS: dict[str, Any] = {"temperature": 1, "seed": 41, "stop": [" the", "ing", "."], "n": 6}
"""Different stop strings end choices at different times, some by none of them."""


def pieces_of_choices(api: CellApi, prompt: list[int], max_tokens: int, **fields: Any) -> list[Any]:
    pieces = api.stream(prompt, max_tokens, **fields)
    numbers = sorted({piece["index"] for piece in pieces})
    return [[piece for piece in pieces if piece["index"] == number] for number in numbers]


def told(choice: Any) -> tuple[int, str, str, list[int]]:
    return choice["index"], choice["text"], choice["finish_reason"], choice["token_ids"]


def told_in_pieces(pieces: list[Any]) -> tuple[int, str, str, list[int]]:
    (reason,) = [p["finish_reason"] for p in pieces if p["finish_reason"] is not None]
    text = "".join(piece["text"] for piece in pieces)
    return pieces[0]["index"], text, reason, [i for piece in pieces for i in piece["token_ids"]]


def test_choices_with_different_ends_are_the_same_set_again_and_streamed(api: CellApi) -> None:
    prompt = random_prompt(81, 100)
    fields = {"return_token_ids": True} | ENDS
    first = api.complete(prompt, 24, **fields)
    choices = [told(choice) for choice in first["choices"]]
    assert [index for index, *_ in choices] == list(range(6))
    assert len({tuple(ids) for *_, ids in choices}) > 3  # two may stop with the same first token
    assert len({len(ids) for *_, ids in choices}) > 1
    assert all(stop not in text for _, text, *_ in choices for stop in ENDS["stop"])
    assert [told(choice) for choice in api.complete(prompt, 24, **fields)["choices"]] == choices
    streamed = pieces_of_choices(api, prompt, 24, **fields)
    assert [told_in_pieces(pieces) for pieces in streamed] == choices
    assert first["usage"]["prompt_tokens"] == 100
    assert first["usage"]["completion_tokens"] == sum(len(ids) for *_, ids in choices)
    other = api.complete(prompt, 24, **fields | {"seed": 42})
    assert [told(choice) for choice in other["choices"]] != choices


def test_without_a_seed_choices_differ_from_one_another_and_from_the_next_set(api: CellApi) -> None:
    fields = {"n": 4, "temperature": 1, "return_token_ids": True}
    prompt = random_prompt(82, 20)
    answers = [api.complete(prompt, 16, **fields) for _ in range(2)]
    drawn = {tuple(choice["token_ids"]) for answer in answers for choice in answer["choices"]}
    assert len(drawn) == 8


@pytest.mark.parametrize("num_prompt_tokens", [5, 96, 101])
def test_the_gate_meets_the_prompt_once_for_all_choices(
    api: CellApi, num_prompt_tokens: int
) -> None:
    before = api.metrics()
    prompt = random_prompt(830 + num_prompt_tokens, num_prompt_tokens)
    usage = api.complete(prompt, 8, n=4, temperature=1, seed=1)["usage"]
    rise = api.rise_since(before)
    assert rise["pointsman_gate_tokens_total", ()] == num_prompt_tokens + 4 * 7
    assert rise["pointsman_prompt_tokens_total", ("computed",)] == num_prompt_tokens
    assert rise["pointsman_generation_tokens_total", ()] == usage["completion_tokens"] == 32
    assert rise["pointsman_requests_finished_total", ("length",)] == 4


def test_choices_of_two_prompts_are_those_of_each_alone(api: CellApi) -> None:
    prompts: Any = [random_prompt(84, 40), random_prompt(85, 33)]
    fields = {"n": 3, "temperature": 1, "seed": 5}
    answer = api.complete(prompts, 10, **fields)
    alone = [c["text"] for p in prompts for c in api.complete(p, 10, **fields)["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == alone
    assert len(set(alone)) == 6
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (73, 60)


def test_routes_and_logprobs_of_choices_are_those_of_the_same_text_computed_alone(
    api: CellApi,
) -> None:
    prompt = random_prompt(86, 50)
    fields = EVERYTHING | {"n": 3, "temperature": 1, "seed": 9, "logprobs": 2}
    answer = api.complete(prompt, 9, **fields)
    of_prompt = answer_of({"choices": [{**answer["choices"][0], **_without_prefix(answer)}]}).routes
    assert answer["prompt_routed_range"] == [0, 50]
    for number, choice in enumerate(answer["choices"]):
        whole = [*prompt, *choice["token_ids"]]
        alone = answer_of(api.complete(whole, 1, cache_salt=f"alone-{number}", **EVERYTHING)).routes
        own = answer_of({"choices": [choice]})
        assert own.routed_range == (50, 58)
        for name in ("topk_ids", "topk_weights"):
            joined = np.concatenate([getattr(of_prompt, name), getattr(own.routes, name)])
            assert joined.tobytes() == getattr(alone, name)[:58].tobytes()
        scored = api.complete(whole, 1, cache_salt=f"alone-{number}", echo=True, logprobs=2)
        logprobs = scored["choices"][0]["logprobs"]["token_logprobs"][50:59]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-5)


def _without_prefix(answer: Any) -> dict[str, Any]:
    names = ("routed_experts", "routed_weights", "routed_range")
    return {name: answer[f"prompt_{name}"] for name in names}


def test_more_choices_than_run_at_once_all_come_and_share_their_prompts(api: CellApi) -> None:
    """A rank runs 64 sequences by default, the cell 256."""
    prompts: Any = [random_prompt(870 + number, 20) for number in range(3)]
    before = api.metrics()
    answer = api.complete(prompts, 2, n=100, temperature=1, seed=3)
    assert [choice["index"] for choice in answer["choices"]] == list(range(300))
    assert answer["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 60,
        "completion_tokens": 600,
        "total_tokens": 660,
        "prompt_tokens_details": None,
    }
    assert api.rise_since(before)["pointsman_gate_tokens_total", ()] == 60 + 300


def test_a_client_that_leaves_mid_stream_takes_all_its_choices_along(api: CellApi) -> None:
    before = api.metrics()
    body = completion_body(random_prompt(88, 64), 1500, stream=True, n=4, temperature=1)
    seen: set[int] = set()
    with api.http.stream("POST", f"{api.base_url}/v1/completions", json=body) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                seen |= {c["index"] for c in json.loads(line.removeprefix("data: "))["choices"]}
            if len(seen) == 4:
                break
    assert api.is_idle()
    rise = api.rise_since(before)
    assert rise["pointsman_requests_finished_total", ("abort",)] == 4
    assert rise["pointsman_generation_tokens_total", ()] < 4 * 1500
    api.evict("all")
    assert api.status()["kv_blocks_used"] == [0, 0, 0, 0]
