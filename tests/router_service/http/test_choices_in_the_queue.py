"""Choices of a real engine: more of them than run at once, more than may wait, and clients that leave."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.helpers.content_cell import ContentCell
from tests.helpers.content_workers import oracle
from tests.helpers.scripted_engine import wait_until
from tests.router_service.http.content_server import running_cell
from tests.router_service.http.helpers import COMPLETIONS, assert_error, completion_body, events

PROMPT = list(range(1, 14))
Running = tuple[httpx.Client, ContentCell]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """Four run at once, eight more may wait."""
    with running_cell(num_ranks=2, max_num_seqs=2, max_num_waiting=8) as (client, cell, _):
        yield client, cell


def is_idle(cell: ContentCell) -> bool:
    status = cell.client.status()
    return (status.num_running, status.num_waiting, status.kv_blocks_leased) == (0, 0, 0)


def ids_by_index(answers: list[dict]) -> dict[int, list[int]]:
    ids: dict[int, list[int]] = {}
    for answer in answers:
        for choice in answer["choices"]:
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    return ids


@pytest.mark.parametrize("stream", [False, True])
def test_more_choices_than_run_at_once_all_come(stream: bool, running: Running) -> None:
    client, cell = running
    fields = {"return_token_ids": True, "stream": stream}
    body = completion_body(prompt=[PROMPT, PROMPT[::-1]], n=4, max_tokens=6, **fields)
    response = client.post(COMPLETIONS, json=body)
    got = ids_by_index(events(response) if stream else [response.json()])
    first, second = oracle(PROMPT, 6)[0], oracle(PROMPT[::-1], 6)[0]
    assert got == {index: first if index < 4 else second for index in range(8)}
    assert is_idle(cell)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("num_prompts", "n"), [(1, 9), (3, 3), (9, 1), (8, 128)])
def test_more_choices_than_may_wait_are_one_plain_429_and_nothing_was_begun(
    num_prompts: int, n: int, stream: bool, running: Running
) -> None:
    client, cell = running
    steps = cell.client.status().steps_total
    body = completion_body(prompt=[PROMPT] * num_prompts, n=n, max_tokens=6, stream=stream)
    response = client.post(COMPLETIONS, json=body)
    assert_error(response, 429, None)
    assert response.headers["retry-after"] == "1"
    assert "the bound is 8" in response.json()["error"]["message"]
    assert is_idle(cell)
    assert cell.client.status().steps_total == steps


def test_requests_at_once_are_each_answered_in_full_or_refused_in_full(running: Running) -> None:
    client, cell = running
    body = completion_body(prompt=PROMPT, n=5, max_tokens=20, stream=True, return_token_ids=True)
    with ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(client.post, COMPLETIONS, json=body) for _ in range(8)]
        responses = [future.result() for future in sent]
    served = [response for response in responses if response.status_code == 200]
    expected = dict.fromkeys(range(5), oracle(PROMPT, 20)[0])
    assert served
    assert [ids_by_index(events(response)) for response in served] == [expected] * len(served)
    for response in responses:
        if response not in served:
            assert_error(response, 429, None)
    assert is_idle(cell)


def test_a_client_that_leaves_takes_along_choices_that_run_and_choices_that_wait(
    running: Running,
) -> None:
    client, cell = running
    body = completion_body(prompt=PROMPT, n=8, max_tokens=100, stream=True)
    with client.stream("POST", COMPLETIONS, json=body) as response:
        assert next(response.iter_lines()).startswith("data: {")
    wait_until(lambda: is_idle(cell))
    again = completion_body(prompt=PROMPT, n=8, max_tokens=3, return_token_ids=True)
    got = ids_by_index([client.post(COMPLETIONS, json=again).json()])
    assert got == dict.fromkeys(range(8), oracle(PROMPT, 3)[0])
