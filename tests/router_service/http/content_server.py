"""An HTTP server before a real engine whose workers hold digests: all but the model is what serves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from router_service.api_keys import ApiKeys
from router_service.http_server import BoundPorts, HttpServer
from tests.helpers.channel_keys import KEYS
from tests.helpers.content_cell import ContentCell
from tests.router_service.http.helpers import make_options


@contextmanager
def running_cell(
    *,
    max_body_bytes: int = 4 * 2**20,
    api_keys: ApiKeys | None = None,
    eos_token_ids: tuple[int, ...] = (),
    **cell_options: Any,
) -> Iterator[tuple[httpx.Client, ContentCell, BoundPorts]]:
    """Prompts are token ids below content_workers.VOCAB, because the tokenizer is another model's."""
    with ContentCell(**cell_options) as cell:
        options = make_options(
            cell.service.client_endpoint,
            engine_keys=KEYS.http_server,
            eos_token_ids=eos_token_ids,
            max_model_len=128,
            max_body_bytes=max_body_bytes,
            api_keys=api_keys,
        )
        server = HttpServer(options)
        ports = server.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{ports.port}", timeout=60) as client:
                yield client, cell, ports
        finally:
            server.stop(2)
