"""Answers with long texts are sent in pieces, between which the event loop serves others."""

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest

from cluster.npy import PIECE_BYTES as NPY_PIECE_BYTES
from cluster.npy import NpyText, decode_npy, encode_npy
from router_service.json_pieces import (
    PIECE_BYTES,
    JsonAnswer,
    event_parts,
    in_pieces,
    json_parts,
    num_bytes,
)
from tests.helpers.scripted_engine import ScriptedEngine, scripted_routes
from tests.router_service.http.helpers import COMPLETIONS, completion_body, events, running_server

DIMS = (16, 8)
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 1500, 3
LARGEST = 4 * NPY_PIECE_BYTES // 3 + 200
LONG = NpyText([np.arange(PIECE_BYTES, dtype=np.uint16), np.arange(7, dtype=np.uint16)])


def test_texts_stand_where_they_belong_between_short_ones() -> None:
    texts = [NpyText([np.arange(n, dtype=np.uint8)]) for n in range(3)]
    body = {"a": texts[0], "b": [1, texts[1], {"c": 'mark " é'}], "d": texts[2], "e": None}
    plain = json.loads(b"".join(in_pieces(json_parts(body))))
    of_texts = [encode_npy(np.arange(n, dtype=np.uint8)) for n in range(3)]
    assert plain == {
        "a": of_texts[0],
        "b": [1, of_texts[1], {"c": 'mark " é'}],
        "d": of_texts[2],
        "e": None,
    }


def test_pieces_are_neither_long_nor_many() -> None:
    parts = [
        *event_parts({"short": 1}),
        *event_parts({"long": LONG}),
        *event_parts({"plain": "x" * (3 * PIECE_BYTES)}),
        *[b"y"] * 1000,
    ]
    pieces = list(in_pieces(parts))
    assert max(map(len, pieces)) <= max(PIECE_BYTES, LARGEST)
    assert len(pieces) < 16
    assert sum(map(len, pieces)) == num_bytes(parts)
    assert b"".join(pieces).startswith(b'data: {"short":1}\n\ndata: {"long":"k05VTVBZ')


def test_between_two_pieces_others_have_their_turn_although_the_client_takes_all() -> None:
    parts = json_parts({"long": LONG})
    num_pieces = len(list(in_pieces(parts)))
    turns, sent = 0, 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def send(message: Any) -> None:
        nonlocal sent
        sent += len(message.get("body", b""))

    async def answered() -> None:
        task = asyncio.create_task(other())
        await JsonAnswer(parts)({"type": "http"}, asyncio.Event().wait, send)
        task.cancel()

    asyncio.run(answered())
    assert num_pieces > 4
    assert turns >= num_pieces - 1
    assert sent == num_bytes(parts)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_large_routes_arrive_as_they_are_whole_and_streamed(num_choices: int) -> None:
    engine = ScriptedEngine(route_dims=DIMS, route_part_tokens=100)
    asked = completion_body(
        prompt=[70] * NUM_PROMPT_TOKENS,
        max_tokens=NUM_OUTPUT_TOKENS,
        n=num_choices,
        return_routed_experts="weights",
    )
    with engine, running_server(engine, max_model_len=2000) as (client, _):
        whole = client.post(COMPLETIONS, json=asked)
        streamed = client.post(COMPLETIONS, json=asked | {"stream": True})
    assert len(whole.content) == int(whole.headers["content-length"]) > 4 * NPY_PIECE_BYTES
    expected = scripted_routes(NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS - 1, DIMS)
    for name, array in zip(("routed_experts", "routed_weights"), expected, strict=True):
        for told in (told_whole(whole, name), told_streamed(streamed, name)):
            assert len(told) == num_choices
            for routes in told:
                assert np.array_equal(routes, array)


def told_whole(answer: httpx.Response, name: str) -> list[np.ndarray]:
    body = answer.json()
    return [joined(body, choice, name) for choice in body["choices"]]


def told_streamed(answer: httpx.Response, name: str) -> list[np.ndarray]:
    chunks = events(answer)
    prompt = next((chunk for chunk in chunks if f"prompt_{name}" in chunk), {})
    ends = [c["choices"][0] for c in chunks if name in c["choices"][0]]
    return [joined(prompt, choice, name) for choice in ends]


def joined(body: dict[str, Any], choice: dict[str, Any], name: str) -> np.ndarray:
    """With those of the prompt where they are told apart."""
    texts = [body[f"prompt_{name}"]] if f"prompt_{name}" in body else []
    return np.concatenate([decode_npy(text) for text in [*texts, choice[name]]])


def test_who_leaves_while_a_large_answer_is_sent_is_not_answered_to_the_end() -> None:
    sent: list[int] = []

    async def receive() -> dict[str, str]:
        while len(sent) < 3:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(len(message.get("body", b"")))

    large = JsonAnswer(json_parts({"long": [LONG] * 20}))
    asyncio.run(large({"type": "http"}, receive, send))
    assert sum(sent) < num_bytes(json_parts({"long": [LONG]})) * 3
