"""Builders for tests of the HTTP server: one on a real socket before a scripted engine; reading of streams."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from router_service.chat_template import load_chat_template
from router_service.http_server import BoundPorts, HttpServer, HttpServerOptions
from router_service.tokenizer import TextCodec
from tests.helpers.scripted_engine import ScriptedEngine

DEMO_MODEL = Path(__file__).parents[3] / "deploy" / "demo_model"
MODEL = "demo"
CREATED = 1_700_000_000
"""When the model was, in Unix seconds."""
VOCAB_SIZE = 3072
CODEC = TextCodec(DEMO_MODEL)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def tokens(text: str) -> list[int]:
    return CODEC.encode(text, add_special_tokens=False)


def render(messages: list[dict[str, Any]]) -> str:
    """The prompt of a chat."""
    template = load_chat_template(DEMO_MODEL)
    assert template is not None
    return template.render(messages)


def make_options(endpoint: str, **changes: Any) -> HttpServerOptions:
    values: dict[str, Any] = {
        "model_dir": DEMO_MODEL,
        "served_model_name": MODEL,
        "created": CREATED,
        "max_model_len": 256,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (2, 0),
        "engine_endpoint": endpoint,
        "host": "127.0.0.1",
        "port": 0,
        "admin_host": "127.0.0.1",
        "admin_port": 0,
        "max_body_bytes": 4 * 2**20,
        "version": "0.1.0",
    }
    return HttpServerOptions(**{**values, **changes})


@contextmanager
def running_server(
    engine: ScriptedEngine, **changes: Any
) -> Iterator[tuple[httpx.Client, BoundPorts]]:
    """A client of a running server; `changes` are options."""
    server = HttpServer(make_options(engine.endpoint, **changes))
    ports = server.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{ports.port}", timeout=30) as client:
            yield client, ports
    finally:
        server.stop(2)


def completion_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", **fields}


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that ended with [DONE]."""
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def stream_text(chunks: list[dict[str, Any]]) -> str:
    """Text of a stream with one choice, completion or chat."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices
    )


def assert_error(response: httpx.Response, status: int, field: str | None) -> None:
    """The OpenAI error shape, in plain JSON, naming the field."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == field, error


def assert_serves(client: httpx.Client) -> None:
    """A plain request is answered."""
    response = client.post(COMPLETIONS, json=completion_body())
    assert response.status_code == 200, response.text


def model_with_template(directory: Path, source: str) -> Path:
    """The demo model's text files with another chat template."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).symlink_to(DEMO_MODEL / name)
    (directory / "chat_template.jinja").write_text(source)
    return directory
