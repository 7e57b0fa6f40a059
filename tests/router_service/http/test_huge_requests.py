"""Huge bodies must not stall the event loop: health probes and running streams go on beside them."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx

from tests.helpers.scripted_engine import ScriptedEngine
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    assert_error,
    chat_body,
    completion_body,
    running_server,
    tokens,
)

MIB = 2**20


def chat_of(num_characters: int) -> bytes:
    text = "some words " * (num_characters // 11)
    return json.dumps(chat_body(messages=[{"role": "user", "content": text}])).encode()


def slowest_health(client: httpx.Client, seconds: float) -> float:
    slowest = 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        assert client.get("/health").status_code == 200
        slowest = max(slowest, time.monotonic() - start)
        time.sleep(0.05)
    return slowest


def test_health_answers_within_a_second_beside_huge_bodies_and_a_slow_stream_keeps_its_pace() -> (
    None
):
    engine = ScriptedEngine(token_ids=tokens(" one two three"), step_seconds=0.02)
    with engine, running_server(engine, max_body_bytes=32 * MIB) as (client, _):

        def send(content: bytes) -> httpx.Response:
            return client.post(CHAT, content=content)

        def longest_pause() -> float:
            body = completion_body(stream=True, max_tokens=100)
            with client.stream("POST", COMPLETIONS, json=body) as response:
                times = [time.monotonic() for line in response.iter_lines() if line]
            return max(later - earlier for earlier, later in pairwise(times))

        bodies = [chat_of(5 * MIB), chat_of(30 * MIB), *[chat_of(100_000)] * 50]
        with ThreadPoolExecutor(16) as pool:
            pause = pool.submit(longest_pause)
            answers = [pool.submit(send, body) for body in bodies]
            slowest = slowest_health(client, 2.0)
            for answer in answers:
                assert_error(answer.result(), 400, "messages")
            assert slowest < 1.0
            assert pause.result() < 1.0


def test_long_prompts_that_may_fit_are_tokenised_beside_the_event_loop() -> None:
    """Short words, so that the length alone proves nothing: all of the text goes through the tokenizer."""
    with ScriptedEngine() as engine, running_server(engine, max_model_len=100_000) as (client, _):
        prompt = "a b c d " * 90_000
        with ThreadPoolExecutor(4) as pool:
            answers = [
                pool.submit(client.post, COMPLETIONS, json=completion_body(prompt=prompt))
                for _ in range(4)
            ]
            slowest = slowest_health(client, 1.0)
            for answer in answers:
                assert_error(answer.result(), 400, "prompt")
    assert slowest < 0.5


def test_millions_of_token_ids_are_refused_by_their_number() -> None:
    with ScriptedEngine() as engine, running_server(engine, max_body_bytes=32 * MIB) as (client, _):
        content = b'{"model": "demo", "prompt": [' + b"1," * 4_000_000 + b"1]}"
        response = client.post(COMPLETIONS, content=content)
    assert_error(response, 400, "prompt")
    assert "4000001 tokens" in response.json()["error"]["message"]
