"""Requests that are still being answered while something happens to the cell."""

import json
import ssl
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx

from tests.helpers.served import Served, eventually
from tests.integration.api import completion_body, random_prompt

MAX_TOKENS = 3000
"""A minute of decoding and more."""


@dataclass(frozen=True)
class StreamEnd:
    """How a stream ended."""

    num_tokens: int
    errors: list[str]
    done: bool
    """[DONE] came."""
    broken: bool
    """The connection was closed in the middle."""
    text: str = ""


class OpenRequests:
    """Streamed and whole completions, each on a thread and a connection of its own."""

    def __init__(
        self,
        served: Served,
        *,
        num_streams: int,
        num_whole: int = 0,
        max_tokens: int = MAX_TOKENS,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        self._verify = verify
        self._max_tokens = max_tokens
        self._url = f"{served.base_url}/v1/completions"
        self._flowing = threading.Semaphore(0)
        self.streams = [_in_thread(self._stream, n) for n in range(num_streams)]
        self.whole = [_in_thread(self._whole, num_streams + n) for n in range(num_whole)]
        for _ in self.streams:
            assert self._flowing.acquire(timeout=60.0), "a stream did not begin"

    def stream_ends(self, seconds: float) -> list[StreamEnd]:
        return [stream.result(timeout=seconds) for stream in self.streams]

    def answers(self, seconds: float) -> list[httpx.Response]:
        """Of the whole ones."""
        return [answer.result(timeout=seconds) for answer in self.whole]

    def _whole(self, number: int) -> httpx.Response:
        return httpx.post(self._url, json=self._body(number), timeout=120.0, verify=self._verify)

    def _body(self, number: int, **fields: Any) -> dict[str, Any]:
        return completion_body(random_prompt(number, 24), self._max_tokens, **fields)

    def _stream(self, number: int) -> StreamEnd:
        num_tokens, errors, done, text = 0, [], False, ""
        try:
            with (
                httpx.Client(timeout=120.0, verify=self._verify) as client,
                client.stream("POST", self._url, json=self._body(number, stream=True)) as answer,
            ):
                for line in answer.iter_lines():
                    event = line.removeprefix("data: ")
                    if event == "[DONE]":
                        done = True
                    elif event:
                        body = json.loads(event)
                        if "error" in body:
                            errors.append(body["error"]["message"])
                        else:
                            num_tokens += 1
                            text += body["choices"][0]["text"] if body["choices"] else ""
                    if num_tokens == 3:
                        self._flowing.release()
        except httpx.TransportError:
            return StreamEnd(num_tokens, errors, done, broken=True, text=text)
        return StreamEnd(num_tokens, errors, done, broken=False, text=text)


def health(served: Served) -> httpx.Response:
    return httpx.get(f"{served.base_url}/health", timeout=10.0)


def unhealthy_reason(served: Served, seconds: float) -> str:
    """Waits for /health to say 503."""

    def reason() -> str | None:
        answer = health(served)
        return answer.text if answer.status_code == 503 else None

    return eventually(reason, seconds, "503 from /health")


def _in_thread(function: Any, number: int) -> "Future[Any]":
    """Daemons: a failed test does not wait for them."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(number))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
