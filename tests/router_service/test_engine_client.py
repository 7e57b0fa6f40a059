"""What an HTTP server makes of the engine's refusals, over a real socket."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from cluster.errors import CellError, PointsmanError, RequestError
from cluster.messages import SamplingParams, Submit
from router_service.engine_client import EngineClient
from tests.helpers.content_cell import ContentCell


def make_submit(request_id: str, num_tokens: int) -> Submit:
    sampling = SamplingParams(8, 0.0, 1.0, None, ())
    return Submit(request_id, np.zeros(num_tokens, np.int32), sampling, None, False)


async def submit_and_read(endpoint: str, submit: Submit) -> None:
    client = EngineClient(endpoint, "http-7")
    client.start()
    try:
        async with asyncio.timeout(10), aclosing(client.generate([submit])) as deltas:
            async for _ in deltas:
                pass
    finally:
        await client.close()


def refusal_of(cell: ContentCell, submit: Submit) -> PointsmanError:
    with pytest.raises(PointsmanError) as refused:
        asyncio.run(submit_and_read(cell.service.client_endpoint, submit))
    return refused.value


def test_a_request_that_can_never_fit_is_the_requests_error_and_not_the_cells() -> None:
    with ContentCell() as cell:
        refusal = refusal_of(cell, make_submit("huge", 10_000))
    assert type(refusal) is RequestError
    assert "shorten the prompt" in str(refusal)


def test_a_cell_that_is_starting_is_unavailable() -> None:
    with ContentCell(ranks_come=False) as cell:
        refusal = refusal_of(cell, make_submit("early", 3))
    assert type(refusal) is CellError
    assert str(refusal) == "starting"
