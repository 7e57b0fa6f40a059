"""An HTTP server whose way to its engine can be cut, and led to another engine."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from router_service.http_server import HttpServer
from tests.helpers.relay import Relay
from tests.helpers.scripted_engine import ScriptedEngine, wait_until
from tests.router_service.http.helpers import make_options

LOST = "is lost and is started again"
_PATIENCE = 30.0


@dataclass(frozen=True)
class CutServing:
    client: httpx.Client
    admin: httpx.Client
    relay: Relay
    pool: ThreadPoolExecutor

    def post(self, path: str, body: dict[str, Any]) -> "Future[httpx.Response]":
        return self.pool.submit(self.client.post, path, json=body)

    def cut_when(self, has_told: Callable[[], bool]) -> None:
        """Once the server has taken what the engine has told then: an answer to a probe comes behind it."""
        wait_until(has_told)
        assert self.client.get("/health").status_code in (200, 503)
        self.cut()

    def cut(self) -> None:
        """Returns when the server knows."""
        self.relay.cut()
        wait_until(lambda: LOST in self.client.get("/health").text)

    def lead_to(self, endpoint: str) -> None:
        """Returns when the server is connected."""
        self.relay.lead_to(endpoint)
        wait_until(lambda: LOST not in self.client.get("/health").text)


@contextmanager
def cut_serving(endpoint: str, **options: Any) -> Iterator[CutServing]:
    """options: of the server."""
    with Relay(endpoint) as relay, ThreadPoolExecutor(16) as pool:
        server = HttpServer(make_options(relay.endpoint, **options))
        ports = server.start()
        try:
            url = "http://127.0.0.1"
            with (
                httpx.Client(base_url=f"{url}:{ports.port}", timeout=_PATIENCE) as client,
                httpx.Client(base_url=f"{url}:{ports.admin_port}", timeout=_PATIENCE) as admin,
            ):
                wait_until(lambda: client.get("/health").status_code == 200)
                yield CutServing(client, admin, relay, pool)
        finally:
            server.stop(2)


def has_told(engine: ScriptedEngine, num_tokens: int, num_requests: int = 1) -> Callable[[], bool]:
    """It has told so many tokens of each of its requests, and was to tell no more."""
    assert engine.stalls_after == num_tokens
    return lambda: engine.num_told == [num_tokens] * num_requests


def facts(answer: httpx.Response) -> str:
    """All but what is another one's each time: ids and times."""
    assert answer.status_code == 200, answer.text
    text = re.sub(r"[0-9a-f]{32}", "ID", answer.text)
    return re.sub(r'"(created|created_at)":[0-9.]+', r'"\1":0', text)
