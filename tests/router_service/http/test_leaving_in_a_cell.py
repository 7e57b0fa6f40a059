"""Clients that leave a real engine: in whatever phase, their requests are off every rank within two steps."""

import random
import socket
import time
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from cluster.messages import Abort
from router_service.http_server import BoundPorts
from tests.helpers.content_cell import ContentCell
from tests.helpers.scripted_engine import wait_until
from tests.router_service.http.content_server import running_cell
from tests.router_service.http.helpers import COMPLETIONS, completion_body
from tests.router_service.http.test_clients_that_leave import connection

PROMPTS = [[number] * 12 + [7] * 9 for number in range(1, 7)]
NUM_LEAVING = 60


@pytest.fixture(scope="module")
def running() -> Any:
    with running_cell(num_ranks=2) as running:
        yield running


def body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return completion_body(**({"prompt": prompt, "max_tokens": 100} | fields))


def assert_nothing_left(cell: ContentCell) -> None:
    wait_until(lambda: cell.ranks.content.sequences == set())
    status = cell.client.status()
    assert (status.num_running, status.num_waiting, status.kv_blocks_leased) == (0, 0, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"stream": False},
        {"stream": True, "n": 3},
        {"echo": True, "logprobs": 1, "max_tokens": 60},
        {"return_routed_experts": True},
    ],
)
def test_a_disconnect_frees_the_request_on_all_ranks_within_two_steps(
    running: tuple[httpx.Client, ContentCell, BoundPorts], fields: dict[str, Any]
) -> None:
    """The ranks hold a step back until the engine has been told, so that steps and not seconds are counted."""
    client, cell, ports = running
    with ExitStack() as opened:
        for prompt in PROMPTS[:2]:
            opened.enter_context(connection(ports, COMPLETIONS, body(prompt, **fields)))
        wait_until(lambda: {rank for rank, _ in cell.ranks.content.sequences} == {0, 1})
        cell.ranks.may_answer.clear()
        cell.ranks.in_step.clear()
        assert cell.ranks.in_step.wait(10)
    num_requests = 2 * int(fields.get("n", 1))
    wait_until(lambda: _num_aborts(cell) == num_requests)
    before = len(cell.ranks.content.steps)
    cell.ranks.may_answer.set()
    wait_until(lambda: not cell.ranks.content.sequences)
    assert len(cell.ranks.content.steps) - before <= 2
    assert_nothing_left(cell)
    assert client.post(COMPLETIONS, json=body([5, 6], max_tokens=2)).status_code == 200


def _num_aborts(cell: ContentCell) -> int:
    """Of those that wait for the end of the step."""
    return sum(isinstance(command, Abort) for _, command in list(cell.service._commands))


def test_clients_that_leave_at_random_moments_leave_gauges_and_blocks_as_they_were(
    running: tuple[httpx.Client, ContentCell, BoundPorts],
) -> None:
    client, cell, ports = running
    random_ = random.Random(17)
    opened: list[tuple[Any, socket.socket]] = []
    for number in range(NUM_LEAVING):
        fields = {"stream": number % 2 == 0, "n": random_.choice([1, 1, 3])}
        request = connection(ports, COMPLETIONS, body(random_.choice(PROMPTS), **fields))
        opened.append((request, request.__enter__()))
        if random_.random() < 0.5:
            time.sleep(random_.random() / 50)  # the moment is what varies, nothing waits for it
        if len(opened) > 5:
            leaving, _ = opened.pop(random_.randrange(len(opened)))
            leaving.__exit__(None, None, None)
    for leaving, _ in opened:
        leaving.__exit__(None, None, None)
    # accepted after all of them, so that none is still to come
    assert client.post(COMPLETIONS, json=body([5, 6], max_tokens=2)).status_code == 200
    wait_until(lambda: _is_idle(cell))
    assert_nothing_left(cell)


def _is_idle(cell: ContentCell) -> bool:
    status = cell.client.status()
    return status.num_running == status.num_waiting == 0
