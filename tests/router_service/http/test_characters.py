"""Characters that several tokens make up, seen from a client."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer

from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    COMPLETIONS,
    DEMO_MODEL,
    completion_body,
    events,
    running_server,
    stream_text,
    tokens,
)

REFERENCE = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
TEXTS = ["🙂🙂", "a 👨‍👩‍👧 b", "漢字かな", "naïve café"]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_and_whole_text_agree_wherever_the_limit_cuts(text: str) -> None:
    ids = tokens(text)
    with ScriptedEngine(token_ids=ids) as engine, running_server(engine) as (client, _):
        for max_tokens in range(1, len(ids) + 1):
            body = completion_body(max_tokens=max_tokens)
            whole = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
            chunks = events(client.post(COMPLETIONS, json={**body, "stream": True}))
            assert whole == REFERENCE.decode(ids[:max_tokens])
            assert stream_text(chunks) == whole


@pytest.mark.parametrize("text", TEXTS)
def test_no_chunk_carries_half_a_character(text: str) -> None:
    ids = tokens(text)
    with ScriptedEngine(token_ids=ids) as engine, running_server(engine) as (client, _):
        body = completion_body(max_tokens=len(ids), stream=True)
        chunks = events(client.post(COMPLETIONS, json=body))
    assert not [chunk for chunk in chunks if "�" in chunk["choices"][0]["text"]]


def test_requests_at_once_do_not_mix_their_half_characters() -> None:
    prompts = [[70 + index] for index in range(12)]
    texts = [TEXTS[index % len(TEXTS)] * 5 for index in range(12)]
    answers = {tuple(p): tokens(t) for p, t in zip(prompts, texts, strict=True)}

    with ScriptedEngine(answers=answers) as engine, running_server(engine) as (client, _):

        def ask(index: int) -> str:
            body = completion_body(
                prompt=prompts[index], max_tokens=len(tokens(texts[index])), stream=True
            )
            return stream_text(events(client.post(COMPLETIONS, json=body)))

        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(ask, range(12))) == texts
