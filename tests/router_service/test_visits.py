"""An exception that nobody expected: answered, told by its place, its message kept to itself."""

import asyncio

from starlette.types import Message, Receive, Scope, Send

from router_service.visits import Visits
from tests.router_service.http.captured_logs import captured_logs

MARKER = "xyzzy7marker"


async def fails(scope: Scope, receive: Receive, send: Send) -> None:
    try:
        raise KeyError(MARKER)
    except KeyError as error:
        raise ValueError(f"cannot take {MARKER}") from error


async def fails_midway(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise ValueError(MARKER)


def visit(app) -> list[Message]:
    sent: list[Message] = []

    async def run() -> None:
        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            raise AssertionError("nobody reads")

        scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
        await Visits(app, logs_access=True)(scope, receive, send)

    asyncio.run(run())
    return sent


def test_an_unexpected_failure_is_an_answer_with_an_id_and_a_line_without_its_message() -> None:
    with captured_logs() as logs:
        start, body = visit(fails)
    headers = dict(start["headers"])
    assert start["status"] == 500
    assert b"internal error" in body["body"]
    failed, told = logs.about(headers[b"x-request-id"].decode())
    assert "ValueError at " in failed
    assert "test_visits.py" in failed
    assert failed.endswith("after KeyError")
    assert "status=500" in told
    assert logs.about(MARKER) == []


def test_a_failure_in_an_answer_that_has_begun_sends_nothing_more() -> None:
    with captured_logs() as logs:
        sent = visit(fails_midway)
    assert [message["type"] for message in sent] == ["http.response.start"]
    assert "status=200 whole=no" in logs.about("request method")[0]
