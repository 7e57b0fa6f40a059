"""Prompts scored over HTTP with `echo` and `logprobs`: as transformers scores them, the next time from the store."""

from typing import Any

import pytest
import torch

from tests.helpers.equality import ReferenceModel
from tests.helpers.tiny_checkpoints import DEMO_MODEL_DIR
from tests.integration.api import CellApi, random_prompt, source_of

pytestmark = pytest.mark.ray
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return ReferenceModel(DEMO_MODEL_DIR)


def scores_of(answer: Any) -> list[float | None]:
    return answer["choices"][0]["logprobs"]["token_logprobs"]


def expected(reference: ReferenceModel, token_ids: list[int]) -> list[float]:
    logprobs = torch.log_softmax(reference.pass_of(token_ids[:-1]).logits, dim=-1)
    return logprobs[torch.arange(len(token_ids) - 1), token_ids[1:]].tolist()


def test_scores_are_those_of_transformers_and_the_same_from_every_part_of_the_store(
    api: CellApi, reference: ReferenceModel
) -> None:
    prompt = random_prompt(71, 130)
    fields = {"echo": True, "logprobs": 1, "return_token_ids": True}
    cold = api.complete(prompt, 4, **fields)
    token_ids = [*prompt, *cold["choices"][0]["token_ids"]]
    assert scores_of(cold)[0] is None
    assert scores_of(cold)[1:] == pytest.approx(expected(reference, token_ids), abs=TOLERANCE)
    for part in (None, "scores", "kv", "all"):
        if part is not None:
            api.evict(part)
        again = api.complete(prompt, 4, **fields)
        assert again["choices"][0]["logprobs"] == cold["choices"][0]["logprobs"]


def test_a_prompt_scored_before_is_answered_without_a_step(api: CellApi) -> None:
    prompt = random_prompt(72, 128)
    fields = {"echo": True, "logprobs": 0}
    first = api.complete(prompt, 1, **fields)
    steps = api.status()["steps_total"]
    again = api.complete(prompt, 0, **fields)
    assert api.status()["steps_total"] == steps
    assert scores_of(again) == scores_of(first)[:128]
    assert again["usage"]["completion_tokens"] == 0
    assert again["choices"][0]["finish_reason"] == "length"


def test_scores_over_kept_kv_need_no_gate_and_leave_the_kv(api: CellApi) -> None:
    prompt = random_prompt(73, 128)
    api.complete(prompt, 1)
    before = api.metrics()
    scored = api.complete(prompt, 0, echo=True, logprobs=0)
    rise = api.rise_since(before)
    assert rise["pointsman_gate_tokens_total", ()] < 16
    assert source_of(scored) == (0, 128)
    assert source_of(api.complete(prompt, 1)) == (112, 16)


def test_a_salt_keeps_scores_to_itself(api: CellApi) -> None:
    prompt = random_prompt(74, 64)
    api.complete(prompt, 1, echo=True, logprobs=0, cache_salt="mine")
    steps = api.status()["steps_total"]
    api.complete(prompt, 0, echo=True, logprobs=0, cache_salt="other")
    assert api.status()["steps_total"] > steps


def test_logprobs_of_a_stream_and_of_choices_agree_with_the_whole_answer(api: CellApi) -> None:
    prompt = random_prompt(75, 40)
    fields = {"echo": True, "logprobs": 3, "temperature": 1.0, "seed": 11}
    whole = api.complete(prompt, 6, n=3, **fields)["choices"]
    pieces = api.stream(prompt, 6, n=3, **fields)
    for choice in whole:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            streamed = [v for p in own if p["logprobs"] for v in p["logprobs"][name]]
            assert streamed == values
    assert len({choice["text"] for choice in whole}) > 1
