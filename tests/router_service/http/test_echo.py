"""`echo`: the prompt first in every choice, with its log-probs if they were asked, whole and streamed."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cluster.scores import ScoreColumns
from router_service.prompt_echo import PromptEcho
from router_service.tokenizer import TextCodec
from tests.helpers.scripted_engine import ScriptedEngine, scripted_score
from tests.router_service.http.helpers import (
    CODEC,
    COMPLETIONS,
    DEMO_MODEL,
    assert_error,
    completion_body,
    events,
    running_server,
    tokens,
)

PROMPT = "hello there, \U0001f680 world"
TEXT = " one two three"
IDS = tokens(TEXT)
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def client() -> Any:
    with ScriptedEngine(token_ids=IDS) as engine, running_server(engine) as (client, _):
        yield client


def choices_of(client: httpx.Client, *, stream: bool, **fields: Any) -> list[dict[str, Any]]:
    """Text, log-prob lists and finish reason of every choice, in order."""
    body = completion_body(**({"prompt": PROMPT, "max_tokens": len(IDS), "echo": True} | fields))
    response = client.post(COMPLETIONS, json={**body, "stream": stream})
    assert response.status_code == 200, response.text
    if not stream:
        return response.json()["choices"]
    joined: dict[int, dict[str, Any]] = {}
    for chunk in events(response):
        for choice in chunk["choices"]:
            whole = joined.setdefault(choice["index"], {"text": "", "logprobs": None})
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                lists = whole["logprobs"] or {name: [] for name in LISTS}
                whole["logprobs"] = {n: [*lists[n], *choice["logprobs"][n]] for n in LISTS}
    return [joined[index] for index in sorted(joined)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [0, 1, 5])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("as_ids", [False, True])
def test_all_lists_cover_prompt_and_completion_and_offsets_index_the_text(
    client: httpx.Client, asked: int, max_tokens: int, as_ids: bool, stream: bool
) -> None:
    prompt_ids = tokens(PROMPT)
    (choice,) = choices_of(
        client,
        stream=stream,
        prompt=prompt_ids if as_ids else PROMPT,
        logprobs=asked,
        max_tokens=max_tokens,
    )
    ids = [*prompt_ids, *IDS[:max_tokens]]
    assert choice["text"] == PROMPT + "".join(CODEC.token_text(i) for i in IDS[:max_tokens])
    lists = choice["logprobs"]
    assert all(len(lists[name]) == len(ids) for name in LISTS)
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    assert lists["tokens"] == [CODEC.token_text(token_id) for token_id in ids]
    for place, token_id in enumerate(ids[1:], start=1):
        logprob, _ = scripted_score(token_id, max(asked, 1))
        assert lists["token_logprobs"][place] == pytest.approx(logprob)
        top = lists["top_logprobs"][place]
        assert lists["tokens"][place] in top
        assert len(top) in (max(asked, 1), asked + 1)
    for place, offset in enumerate(lists["text_offset"]):
        token = lists["tokens"][place]
        if not token.startswith("bytes:"):
            assert choice["text"][offset : offset + len(token)] == token
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_without_logprobs_only_the_text_comes_first(
    client: httpx.Client, max_tokens: int, stream: bool
) -> None:
    (choice,) = choices_of(client, stream=stream, max_tokens=max_tokens)
    assert choice["text"] == PROMPT + "".join(CODEC.token_text(i) for i in IDS[:max_tokens])
    assert choice["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_has_each_prompt_before_its_own_choices(client: httpx.Client, stream: bool) -> None:
    prompts = ["hello", PROMPT, "a b c"]
    choices = choices_of(client, stream=stream, prompt=prompts, logprobs=0, n=2, max_tokens=2)
    completion = "".join(CODEC.token_text(i) for i in IDS[:2])
    assert [c["text"] for c in choices] == [p + completion for p in prompts for _ in range(2)]
    for first, second in zip(choices[::2], choices[1::2], strict=True):
        assert first["logprobs"] == second["logprobs"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_what_choices_say_waits_for_the_scores_of_their_prompt(n: int, stream: bool) -> None:
    with (
        ScriptedEngine(token_ids=IDS, prompt_score_delay=5) as engine,
        running_server(engine) as (client, _),
    ):
        choices = choices_of(client, stream=stream, logprobs=1, n=n)
        assert [c["text"] for c in choices] == [PROMPT + TEXT] * n
        for choice in choices:
            assert len(choice["logprobs"]["tokens"]) == len(tokens(PROMPT)) + len(IDS)
        assert [submit.score_prompt for submit in engine.submits] == [True] + [False] * (n - 1)


def test_stop_strings_are_looked_for_in_the_completion_alone(client: httpx.Client) -> None:
    (choice,) = choices_of(client, stream=False, prompt="hello two", stop=" two", logprobs=0)
    assert choice["text"] == "hello two one"
    assert choice["finish_reason"] == "stop"
    assert max(choice["logprobs"]["text_offset"]) == len("hello two one")


def test_the_engine_is_asked_for_scores_only_where_they_are_shown() -> None:
    with ScriptedEngine(token_ids=IDS) as engine, running_server(engine) as (client, _):
        for fields in ({}, {"logprobs": 3}, {"echo": False, "logprobs": 3}):
            choices_of(client, stream=False, **fields)
        asked = [(s.score_prompt, s.num_prompt_alternatives) for s in engine.submits]
        assert asked == [(False, 1), (True, 3), (False, 1)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fills_the_context_can_be_echoed_but_not_continued(
    client: httpx.Client, stream: bool
) -> None:
    prompt = [70] * 256
    (choice,) = choices_of(client, stream=stream, prompt=prompt, max_tokens=0, logprobs=0)
    assert len(choice["logprobs"]["tokens"]) == 256
    for max_tokens in (None, 1):
        body = completion_body(prompt=prompt, max_tokens=max_tokens, echo=True, stream=stream)
        assert client.post(COMPLETIONS, json=body).status_code == 400
    body = completion_body(prompt=[70] * 257, max_tokens=0, echo=True, stream=stream)
    assert_error(client.post(COMPLETIONS, json=body), 400, "prompt")


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"max_tokens": 0, "echo": False}])
def test_no_tokens_without_echo_are_refused(client: httpx.Client, fields: dict[str, Any]) -> None:
    assert_error(client.post(COMPLETIONS, json=completion_body(**fields)), 400, "max_tokens")


def test_usage_of_a_scored_prompt_has_no_completion_tokens(client: httpx.Client) -> None:
    body = completion_body(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    usage = client.post(COMPLETIONS, json=body).json()["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == len(tokens(PROMPT))
    assert usage["completion_tokens"] == 0


MARKED = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_special_tokens_of_a_prompt_are_echoed_as_they_are_written(
    client: httpx.Client, as_ids: bool, stream: bool
) -> None:
    prompt = tokens(MARKED) if as_ids else MARKED
    (choice,) = choices_of(client, stream=stream, prompt=prompt, logprobs=0)
    assert choice["text"] == MARKED + TEXT
    lists = choice["logprobs"]
    assert "".join(lists["tokens"]) == choice["text"]
    for offset, token in zip(lists["text_offset"], lists["tokens"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token


@pytest.mark.parametrize("stream", [False, True])
def test_a_character_that_begins_in_the_prompt_ends_in_the_completion(stream: bool) -> None:
    *begun, last = tokens("\U0001f642")
    with ScriptedEngine(token_ids=[last, *IDS]) as engine, running_server(engine) as (client, _):
        (choice,) = choices_of(client, stream=stream, prompt=[70, *begun], logprobs=0, max_tokens=3)
        assert choice["text"] == CODEC.decode([70, *begun, last, *IDS[:2]])
        assert choice["text"].endswith("\U0001f642 one two")
        places = choice["logprobs"]["text_offset"]
        start = choice["text"].index("\U0001f642")
        assert places == [0, *[start] * (len(begun) + 1), start + 1, start + 5]
        (scored,) = choices_of(client, stream=stream, prompt=[70, *begun], logprobs=0, max_tokens=0)
        assert scored["text"] == CODEC.decode([70, *begun])


@pytest.mark.parametrize("split", range(1, 7))
def test_offsets_are_places_in_the_text_after_broken_characters_too(split: int) -> None:
    ids = [61, 98, 135, 172, 209, 246, 283]
    with ScriptedEngine(token_ids=ids[split:]) as engine, running_server(engine) as (client, _):
        fields = {"prompt": ids[:split], "max_tokens": len(ids) - split, "logprobs": 0}
        (choice,) = choices_of(client, stream=False, **fields)
    assert choice["text"] == CODEC.decode(ids)
    lists = choice["logprobs"]
    for offset, token in zip(lists["text_offset"], lists["tokens"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset : offset + len(token)] == token


def starts_in(echo: PromptEcho, num_tokens: int) -> list[int]:
    rest = num_tokens - 1
    ones, floats = np.ones(rest, np.int32), np.zeros(rest, np.float32)
    echo.add_scores(ScoreColumns(floats, ones, ones, ones, floats))
    return [token.text_offset for token in echo.scored]


@pytest.mark.parametrize(
    ("prompt", "sent", "starts"),
    [
        ("<|im_start|>a b", "a b", [0, 0, 1]),
        ("<|im_start|>a b", None, [0, 12, 13]),
        ("a b", "a b", [0, 1]),
    ],
)
def test_a_token_that_the_tokenizer_put_before_a_text_has_no_characters_in_it(
    prompt: str, sent: str | None, starts: list[int]
) -> None:
    ids = tokens(prompt)
    echo = PromptEcho(ids, CODEC, 0, sent)
    assert echo.text == (sent or prompt)
    assert starts_in(echo, len(ids)) == starts


def test_a_text_that_the_tokenizer_writes_otherwise_is_echoed_as_it_was_sent(
    tmp_path: Path,
) -> None:
    description = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    description["normalizer"] = {"type": "NFC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    codec, text = TextCodec(tmp_path), "ne\u0301 b"
    ids = codec.encode(text, add_special_tokens=True)
    assert codec.decode(ids) == "n\u00e9 b"
    echo = PromptEcho(ids, codec, 0, text)
    assert echo.text == text
    starts = dict(zip(map(codec.token_text, ids), starts_in(echo, len(ids)), strict=True))
    assert (starts["n"], starts[" b"]) == (0, 3)
