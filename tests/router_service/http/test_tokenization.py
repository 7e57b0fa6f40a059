"""/tokenize and /detokenize say what a prompt is made of; /v1/embeddings says why there are none."""

from typing import Any

import httpx
import pytest

from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    CODEC,
    COMPLETIONS,
    MODEL,
    VOCAB_SIZE,
    assert_error,
    assert_serves,
    chat_body,
    completion_body,
    tokens,
)

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
TEXTS = ["hello", "", " two  words\n", "naïve 🙂 文字", "<|im_start|>user<|im_end|>", "a\0b"]


def tokenized(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post(TOKENIZE, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_a_text_become_the_text_again(text: str, client: httpx.Client) -> None:
    ids = tokenized(client, prompt=text)["tokens"]
    assert client.post(DETOKENIZE, json={"tokens": ids}).json() == {"prompt": text}


def test_a_prompt_is_counted_as_a_completion_would_take_it(client: httpx.Client) -> None:
    answer = tokenized(client, model=MODEL, prompt="hello there")
    completion = client.post(
        COMPLETIONS, json=completion_body(prompt="hello there", return_token_ids=True)
    ).json()
    assert answer["tokens"] == completion["prompt_token_ids"]
    assert answer == {
        "count": len(answer["tokens"]),
        "max_model_len": 256,
        "tokens": answer["tokens"],
        "token_strs": None,
    }


def test_messages_are_counted_as_a_chat_would_take_them(client: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    answer = tokenized(client, messages=messages)
    chat = client.post(CHAT, json=chat_body(messages=messages, return_token_ids=True)).json()
    assert answer["tokens"] == chat["prompt_token_ids"]
    assert answer["count"] == chat["usage"]["prompt_tokens"]


def test_without_a_generation_prompt_the_messages_alone_are_counted(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    whole = tokenized(client, messages=messages)["tokens"]
    alone = tokenized(client, messages=messages, add_generation_prompt=False)["tokens"]
    assert len(alone) < len(whole)
    assert whole[: len(alone)] == alone


def test_token_strings_are_entries_of_the_vocabulary(client: httpx.Client) -> None:
    answer = tokenized(client, prompt=" one two", return_token_strs=True)
    assert answer["token_strs"] == [CODEC.vocabulary_entry(i) for i in tokens(" one two")]
    assert answer["token_strs"][0].startswith("Ġ")


def test_nothing_reaches_the_engine(client: httpx.Client, engine: ScriptedEngine) -> None:
    before = len(engine.submits)
    tokenized(client, prompt="hello")
    tokenized(client, messages=[{"role": "user", "content": "hello"}])
    assert len(engine.submits) == before


def test_a_prompt_over_the_context_is_counted_as_long_as_its_length_does_not_tell(
    client: httpx.Client,
) -> None:
    assert tokenized(client, prompt="one two " * 300)["count"] > 256


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (TOKENIZE, {}, "prompt"),
        (TOKENIZE, {"prompt": 3}, "prompt"),
        (TOKENIZE, {"prompt": [1]}, "prompt"),
        (TOKENIZE, {"prompt": "x", "messages": []}, "messages"),
        (TOKENIZE, {"messages": []}, "messages"),
        (TOKENIZE, {"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        (TOKENIZE, {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        (TOKENIZE, {"prompt": "x", "unknown": None}, "unknown"),
        (TOKENIZE, {"prompt": "x" * 20_000}, "prompt"),
        (DETOKENIZE, {}, "tokens"),
        (DETOKENIZE, {"tokens": "x"}, "tokens"),
        (DETOKENIZE, {"tokens": [1, VOCAB_SIZE]}, "tokens[1]"),
        (DETOKENIZE, {"tokens": [-1]}, "tokens[0]"),
        (DETOKENIZE, {"tokens": [True]}, "tokens[0]"),
        (DETOKENIZE, {"tokens": [1.0]}, "tokens[0]"),
        (DETOKENIZE, {"tokens": [1] * 257}, "tokens"),
    ],
)
def test_a_wrong_body_is_refused_with_its_field(
    path: str, body: dict[str, Any], field: str, client: httpx.Client
) -> None:
    assert_error(client.post(path, json=body), 400, field)
    assert_serves(client)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TOKENIZE, {"prompt": "x"}),
        (TOKENIZE, {"messages": [{"role": "user", "content": "x"}]}),
        (DETOKENIZE, {"tokens": [1]}),
    ],
)
def test_another_model_is_not_found(path: str, body: dict[str, Any], client: httpx.Client) -> None:
    assert_error(client.post(path, json={**body, "model": "nope"}), 404, "model")


def test_half_a_character_is_shown_as_replaced(client: httpx.Client) -> None:
    (first, *_) = tokens("🙂")
    assert client.post(DETOKENIZE, json={"tokens": [first]}).json()["prompt"] == "\ufffd"


def test_embeddings_are_refused_with_the_reason(client: httpx.Client) -> None:
    response = client.post("/v1/embeddings", json={"model": MODEL, "input": "x"})
    assert_error(response, 400, "model")
    assert "makes no embeddings" in response.json()["error"]["message"]
