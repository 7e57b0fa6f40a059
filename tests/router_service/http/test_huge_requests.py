"""Huge bodies must not stall the event loop: health probes and running streams go on beside them.

How long a probe may take is measured against the same probe on the idle server, and against the time that all of the
work takes: the machine may be busy with others.
"""

import gc
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any

import httpx
import psutil
import pytest

from cluster.errors import RequestError
from router_service.json_body import parse_json_object
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
HEAD = b'{"model": "demo", '
HOSTILE = {
    "ids": HEAD + b'"prompt": [' + b"1," * (15 * MIB) + b"1]}",
    "lists_of_ids": HEAD + b'"prompt": [' + b"[1]," * (7 * MIB) + b"[1]]}",
    "objects": HEAD + b'"messages": [' + b"{}," * (10 * MIB) + b"{}]}",
    "messages": HEAD + b'"messages": [' + b'{"role":"user","content":"x"},' * MIB + b"{}]}",
    "strings": HEAD + b'"prompt": [' + b'"a",' * (7 * MIB) + b'"a"]}',
}
"""About 30 MB each, of as many values as possible."""
TEXTS = {
    "words": b"some words " * (30 * MIB // 11),
    "commas": b",[{" * (10 * MIB),
    "escaped_quotes": b'\\",' * (10 * MIB),
    "escaped_backslashes": b"\\\\," * (10 * MIB),
}


def chat_of(num_characters: int) -> bytes:
    text = "some words " * (num_characters // 11)
    return json.dumps(chat_body(messages=[{"role": "user", "content": text}])).encode()


def health_seconds(client: httpx.Client) -> float:
    start = time.monotonic()
    assert client.get("/health").status_code == 200
    return time.monotonic() - start


def idle_seconds(client: httpx.Client) -> float:
    return statistics.median(health_seconds(client) for _ in range(20))


def assert_health_answers_beside(
    client: httpx.Client, work: Sequence[Future[Any]], idle: float
) -> float:
    """Until the work is done. Returns how long a probe may have taken: a second, where an idle server answers within
    twenty milliseconds. A loop that does the work itself lets a probe wait for most of it."""
    start, slowest = time.monotonic(), 0.0
    while not all(future.done() for future in work):
        slowest = max(slowest, health_seconds(client))
        time.sleep(0.05)
    allowed = max(1.0, 50 * idle, (time.monotonic() - start) / 4)
    assert slowest < allowed
    return allowed


def longest_pause(client: httpx.Client, num_tokens: int) -> float:
    """Between two events of a stream."""
    body = completion_body(stream=True, max_tokens=num_tokens)
    with client.stream("POST", COMPLETIONS, json=body) as response:
        times = [time.monotonic() for line in response.iter_lines() if line]
    return max(later - earlier for earlier, later in pairwise(times))


def test_health_and_a_slow_stream_keep_their_pace_beside_huge_chats_and_many_long_ones() -> None:
    engine = ScriptedEngine(token_ids=tokens(" one two three"), step_seconds=0.02)
    bodies = [chat_of(5 * MIB), chat_of(30 * MIB), *[chat_of(100_000)] * 50]
    with engine, running_server(engine, max_body_bytes=32 * MIB) as (client, _):
        idle = idle_seconds(client)
        with ThreadPoolExecutor(16) as pool:
            pause = pool.submit(longest_pause, client, 100)
            answers = [pool.submit(client.post, CHAT, content=body) for body in bodies]
            allowed = assert_health_answers_beside(client, [pause, *answers], idle)
        for answer in answers:
            assert_error(answer.result(), 400, "messages")
        assert pause.result() < allowed


def test_fifty_long_prompts_are_tokenised_and_answered_beside_the_event_loop() -> None:
    prompt = "a b c d " * 12_500  # short words, so that the length alone proves nothing
    body = json.dumps(completion_body(prompt=prompt, max_tokens=2)).encode()
    with ScriptedEngine() as engine, running_server(engine, max_model_len=100_000) as (client, _):
        idle = idle_seconds(client)
        with ThreadPoolExecutor(50) as pool:
            answers = [pool.submit(client.post, COMPLETIONS, content=body) for _ in range(50)]
            assert_health_answers_beside(client, answers, idle)
    assert {answer.result().status_code for answer in answers} == {200}


def parse_seconds(body: bytes) -> float:
    """Of processor time, refused or not."""
    start = time.thread_time()
    with suppress(RequestError):
        parse_json_object(body)
    return time.thread_time() - start


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_of_millions_of_values_costs_about_what_a_text_of_its_length_costs(
    name: str,
) -> None:
    text = HEAD + b'"prompt": "' + TEXTS["words"] + b'"}'
    assert parse_seconds(HOSTILE[name]) < 20 * max(parse_seconds(text) for _ in range(3))


@pytest.mark.parametrize("name", HOSTILE)
def test_millions_of_values_are_refused_and_the_limit_is_said(name: str) -> None:
    with pytest.raises(RequestError, match=r"JSON values .* the limit is 1048576; send fewer"):
        parse_json_object(HOSTILE[name])


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_one_value_whatever_characters_it_has(name: str) -> None:
    body = HEAD + b'"prompt": "' + TEXTS[name] + b'"}'
    assert len(parse_json_object(body)["prompt"]) >= 20 * MIB


@pytest.mark.parametrize("before", [MIB - 12, MIB - 11, MIB - 10])
def test_values_are_counted_across_the_pieces_in_which_a_body_is_read(before: int) -> None:
    """A string begins in one piece and ends in the next."""
    value = "x" * before + '"' * 9 + "," * 9
    body = json.dumps({"a": value, "b": [0] * (MIB - 4)}).encode()
    assert parse_json_object(body)["a"] == value
    with pytest.raises(RequestError, match="1048577 JSON values"):
        parse_json_object(json.dumps({"a": value, "b": [0] * (MIB - 2)}).encode())


def test_as_many_token_ids_as_the_limit_allows_are_taken() -> None:
    body = HEAD + b'"prompt": [' + b"1," * (MIB - 4) + b"1]}"
    assert len(parse_json_object(body)["prompt"]) == MIB - 3


def test_hostile_bodies_at_once_leave_health_its_turns() -> None:
    with ScriptedEngine() as engine, running_server(engine, max_body_bytes=64 * MIB) as (client, _):
        idle = idle_seconds(client)
        with ThreadPoolExecutor(len(HOSTILE)) as pool:
            answers = [pool.submit(client.post, CHAT, content=b) for b in HOSTILE.values()]
            assert_health_answers_beside(client, answers, idle)
    for answer in answers:
        assert_error(answer.result(), 400, None)


def test_memory_of_huge_bodies_comes_back() -> None:
    def resident_bytes() -> int:
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    body = chat_of(30 * MIB)
    with ScriptedEngine() as engine, running_server(engine, max_body_bytes=32 * MIB) as (client, _):
        levels = []
        for _ in range(9):
            assert_error(client.post(CHAT, content=body), 400, "messages")
            levels.append(resident_bytes())
    assert min(levels[6:]) - levels[0] < 5 * len(body), levels  # of six that might be kept
