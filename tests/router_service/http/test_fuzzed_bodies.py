"""Thousands of nearly right bodies: each is answered, none is a failure of the server, no neighbour notices."""

import random
import threading
from collections import Counter
from typing import Any

import httpx

from tests.helpers.scripted_engine import wait_until
from tests.router_service.http.content_server import running_cell
from tests.router_service.http.fuzzed_bodies import VALID, mutated_body
from tests.router_service.http.helpers import COMPLETIONS, completion_body, events

NUM_BODIES = 1200
NEIGHBOUR = completion_body(
    prompt=[11, 12, 13, 14, 15], max_tokens=60, stream=True, return_token_ids=True
)


class Neighbour:
    """Streams one and the same answer again and again, on a thread of its own."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._stopping = False
        self.told: list[list[dict[str, Any]]] = []
        self._thread = threading.Thread(target=self._run, name="neighbour")

    def __enter__(self) -> "Neighbour":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._stopping:
            self.told.append(said(self._client))


def said(client: httpx.Client) -> list[dict[str, Any]]:
    """What each chunk of the neighbour's stream says."""
    chunks = events(client.post(COMPLETIONS, json=NEIGHBOUR))
    return [chunk["choices"][0] for chunk in chunks]


def ids_of(choices: list[dict[str, Any]]) -> list[int]:
    return [token_id for choice in choices for token_id in choice["token_ids"]]


def test_no_body_is_a_failure_of_the_server_or_changes_a_neighbours_stream() -> None:
    source = random.Random(20)
    paths = list(VALID)
    statuses: Counter[int] = Counter()
    with running_cell(eos_token_ids=(2,)) as (client, _, ports):
        alone = ids_of(said(client))
        with Neighbour(client) as neighbour:
            for number in range(NUM_BODIES):
                path = paths[number % len(paths)]
                body = mutated_body(path, source)
                response = client.post(path, content=body)
                statuses[response.status_code] += 1
                assert response.status_code < 500, (path, body, response.text)
                assert b"server_error" not in response.content, (path, body, response.text)
                assert b"api_error" not in response.content, (path, body, response.text)
        assert all(ids_of(choices) == alone for choices in neighbour.told)
        assert len(neighbour.told) > 1
        admin = f"http://127.0.0.1:{ports.admin_port}/admin/status"
        wait_until(lambda: client.get(admin).json()["num_running"] == 0)
        assert client.get(admin).json()["kv_blocks_leased"] == 0
        assert ids_of(said(client)) == alone
    assert statuses[200] > NUM_BODIES // 20
    assert statuses[400] > NUM_BODIES // 2
