"""What an HTTP server makes of the engine's refusals, over a real socket."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from cluster.errors import CellError, OverloadedError, PointsmanError, RequestError
from cluster.messages import SamplingParams, Submit
from router_service.engine_client import EngineClient
from tests.helpers.channel_keys import KEYS
from tests.helpers.content_cell import ContentCell


def make_submit(request_id: str, num_tokens: int) -> Submit:
    sampling = SamplingParams(8, 0.0, 1.0, None, ())
    return Submit(request_id, np.zeros(num_tokens, np.int32), sampling, None, False)


async def submit_and_read(endpoint: str, submits: list[Submit]) -> None:
    client = EngineClient(endpoint, "http-7", keys=KEYS.http_server)
    client.start()
    try:
        async with asyncio.timeout(10), aclosing(client.generate(submits)) as deltas:
            async for _ in deltas:
                pass
    finally:
        await client.close()


def refusal_of(cell: ContentCell, *submits: Submit) -> PointsmanError:
    with pytest.raises(PointsmanError) as refused:
        asyncio.run(submit_and_read(cell.service.client_endpoint, list(submits)))
    return refused.value


def test_a_request_that_can_never_fit_is_the_requests_error_and_names_its_field() -> None:
    with ContentCell() as cell:
        refusal = refusal_of(cell, make_submit("huge", 10_000))
    assert type(refusal) is RequestError
    assert "shorten the prompt" in str(refusal)
    assert refusal.field == "prompt"


def test_one_that_can_never_fit_takes_those_beside_it_along() -> None:
    with ContentCell() as cell:
        refusal = refusal_of(cell, make_submit("small", 3), make_submit("huge", 10_000))
        status = cell.client.status()
    assert type(refusal) is RequestError
    assert (status.num_running, status.num_waiting, status.steps_total) == (0, 0, 0)


def test_more_at_once_than_may_wait_are_refused_together_and_none_is_begun() -> None:
    with ContentCell(max_num_waiting=3) as cell:
        refusal = refusal_of(cell, *[make_submit(f"r{number}", 3) for number in range(4)])
        status = cell.client.status()
        asyncio.run(
            submit_and_read(
                cell.service.client_endpoint, [make_submit(f"r{number}", 3) for number in range(3)]
            )
        )
    assert type(refusal) is OverloadedError
    assert "4 would come; the bound is 3" in str(refusal)
    assert (status.num_running, status.num_waiting, status.steps_total) == (0, 0, 0)


def test_two_with_one_id_are_both_refused() -> None:
    with ContentCell() as cell:
        refusal = refusal_of(cell, make_submit("twin", 3), make_submit("twin", 4))
        assert cell.client.status().steps_total == 0
    assert "is in use" in str(refusal)


def test_a_cell_that_is_starting_is_unavailable() -> None:
    with ContentCell(ranks_come=False) as cell:
        refusal = refusal_of(cell, make_submit("early", 3))
    assert type(refusal) is CellError
    assert str(refusal) == "starting"
