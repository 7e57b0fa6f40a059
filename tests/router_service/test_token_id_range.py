"""No client can make a cell compute an id that the model does not have: text side and engine both look."""

import asyncio

import numpy as np
import pytest

from cluster.errors import RequestError
from cluster.messages import SamplingParams, Submit
from router_service.body_validation import validate
from router_service.model_text import load_model_text
from router_service.protocol import ChatBody, CompletionBody
from router_service.request_admission import RequestAdmission, ServedModel
from tests.helpers.content_cell import ContentCell
from tests.helpers.content_workers import SHAPE, VOCAB, ContentWorkers
from tests.helpers.engines import CLIENT, EngineHarness
from tests.router_service.http.helpers import (
    DEMO_MODEL,
    VOCAB_SIZE,
    chat_body,
    completion_body,
    tokens,
)

TEXT = "hello you"
SMALL_VOCAB = max(tokens(TEXT))
"""One id too few for the text."""
NEAR = {-1: "-1", VOCAB: str(VOCAB), 2**31 - 1: str(2**31 - 1), -(2**31): str(-(2**31))}


def served_model(vocab_size: int) -> ServedModel:
    """With a tokenizer that may know more ids than the model, which no loaded one does."""
    return ServedModel(
        model_dir=DEMO_MODEL,
        name="demo",
        max_model_len=256,
        vocab_size=vocab_size,
        eos_token_ids=(0,),
        text=load_model_text(DEMO_MODEL, VOCAB_SIZE),
    )


def refusal(vocab_size: int, body: CompletionBody | ChatBody) -> RequestError | None:
    admission = RequestAdmission(served_model(vocab_size))
    admit = (
        admission.chat(body, None)
        if isinstance(body, ChatBody)
        else admission.completion(body, None)
    )
    try:
        asyncio.run(admit)
    except RequestError as error:
        return error
    finally:
        admission.close()
    return None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (validate(CompletionBody, completion_body(prompt=TEXT)), "prompt"),
        (validate(CompletionBody, completion_body(prompt=["a", TEXT])), "prompt[1]"),
        (
            validate(ChatBody, chat_body(messages=[{"role": "user", "content": TEXT}])),
            "messages",
        ),
    ],
)
def test_a_text_that_makes_an_id_out_of_range_is_refused_by_field(
    body: CompletionBody | ChatBody, field: str
) -> None:
    error = refusal(SMALL_VOCAB, body)
    assert error is not None
    assert error.field == field
    assert f"0 to {SMALL_VOCAB - 1}" in str(error)
    assert refusal(VOCAB_SIZE, body) is None


@pytest.mark.parametrize("token_id", NEAR)
def test_the_engine_refuses_an_id_out_of_range_and_keeps_nothing(token_id: int) -> None:
    harness = EngineHarness(ContentWorkers(1, 4), SHAPE, vocab_size=VOCAB)
    prompt = np.array([1, token_id, 2], np.int32)
    submit = Submit("r", prompt, SamplingParams(2, 0.0, 1.0, None, ()), None, False)
    with pytest.raises(RequestError, match=f"hold {NEAR[token_id]}: ids are from 0 to {VOCAB - 1}"):
        harness.engine.submit(CLIENT, submit)
    assert not harness.engine.has_work
    assert harness.generate("r", [0, VOCAB - 1], 2).completion is not None


def test_a_cell_answers_the_others_after_ids_out_of_range() -> None:
    with ContentCell() as cell:
        cell.client.submit("bad", [1, 2, VOCAB], 2)
        cell.client.submit("good", [1, 2, VOCAB - 1], 2)
        cell.client.wait_for("bad", "good")
        assert cell.client.refusals["bad"].kind == "invalid"
        assert cell.client.completions["good"].finish_reason == "length"
        assert cell.client.status().ready
