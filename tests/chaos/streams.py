"""Greedy streams that are asked for together, and what came of them."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.integration.api import completion_body, random_prompt

SHARED_TOKENS = 96
OWN_TOKENS = 48
TIMEOUT_SECONDS = 120.0
"""Between two tokens."""
Address = tuple[str, int]
"""Host and port of one end of a connection."""


@dataclass
class Stream:
    token_ids: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    is_whole: bool = False
    is_open: bool = True
    """Neither its end nor an error has come."""
    token_times: list[float] = field(default_factory=list, repr=False)
    """Of each event with tokens, on the monotonic clock."""
    client: Address | None = None
    """Its own end of the connection; None until there is one."""

    def on_trace(self, event: str, about: dict[str, Any]) -> None:
        """Of httpcore, which tells each connection that it makes."""
        if event == "connection.connect_tcp.complete":
            host, port, *_ = about["return_value"].get_extra_info("client_addr")
            self.client = host, port


def prompt_of(number: int) -> list[int]:
    """Four share a beginning."""
    return random_prompt(1000 + number // 4, SHARED_TOKENS) + random_prompt(number, OWN_TOKENS)


class Streams:
    """Owner of the threads. What has come can be looked at while they run."""

    def __init__(self, base_url: str, number: int, max_tokens: int) -> None:
        self._url = f"{base_url}/v1/completions"
        self._max_tokens = max_tokens
        self._streams = [Stream() for _ in range(number)]
        self._pool = ThreadPoolExecutor(number)
        self._futures: list[Future[None]] = [
            self._pool.submit(self._run, n, stream) for n, stream in enumerate(self._streams)
        ]

    @property
    def num_open(self) -> int:
        return sum(stream.is_open for stream in self._streams)

    @property
    def open_clients(self) -> set[Address | None]:
        """Of streams that are open; None among them when one has no connection yet."""
        return {stream.client for stream in self._streams if stream.is_open}

    @property
    def share_of_tokens(self) -> float:
        """That have come, of all that were asked for."""
        told = sum(len(stream.token_ids) for stream in self._streams)
        return told / (len(self._streams) * self._max_tokens)

    def ends(self) -> list[Stream]:
        for future in self._futures:
            future.result(TIMEOUT_SECONDS + 30.0)
        self._pool.shutdown()
        return self._streams

    def _run(self, number: int, stream: Stream) -> None:
        body = completion_body(
            prompt_of(number), self._max_tokens, stream=True, return_token_ids=True
        )
        try:
            with (
                httpx.Client(timeout=TIMEOUT_SECONDS) as client,
                client.stream(
                    "POST", self._url, json=body, extensions={"trace": stream.on_trace}
                ) as answer,
            ):
                for line in answer.iter_lines():
                    self._take(stream, line.removeprefix("data: "))
        except httpx.TransportError as error:
            stream.errors.append(f"{type(error).__name__}: {error}")
        finally:
            stream.is_open = False

    def _take(self, stream: Stream, event: str) -> None:
        if event == "[DONE]":
            stream.is_whole = not stream.errors
        elif event:
            told = json.loads(event)
            if "error" in told:
                stream.errors.append(told["error"]["message"])
            for choice in told.get("choices", ()):
                if token_ids := choice.get("token_ids"):
                    stream.token_ids += token_ids
                    stream.token_times.append(time.monotonic())


def longest_pause(streams: Sequence[Stream], since: float) -> float:
    """Seconds in which no stream at all got a token, from `since` to the last token."""
    times = sorted(t for stream in streams for t in stream.token_times if t > since)
    return max((b - a for a, b in zip([since, *times], times, strict=False)), default=0.0)
