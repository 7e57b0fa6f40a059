"""Greedy streams that are asked for together, and what came of them."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from tests.helpers.served import Served
from tests.integration.api import completion_body, random_prompt

SHARED_TOKENS = 96
OWN_TOKENS = 48
TIMEOUT_SECONDS = 300.0


@dataclass
class Stream:
    token_ids: list[int] = field(default_factory=list)
    error: str | None = None
    is_whole: bool = False


def prompt_of(number: int) -> list[int]:
    """Four share a beginning."""
    return random_prompt(1000 + number // 4, SHARED_TOKENS) + random_prompt(number, OWN_TOKENS)


class Streams:
    """Owner of the threads."""

    def __init__(self, served: Served, number: int, max_tokens: int) -> None:
        self._url = f"{served.base_url}/v1/completions"
        self._max_tokens = max_tokens
        self._pool = ThreadPoolExecutor(number)
        self._futures: list[Future[Stream]] = [
            self._pool.submit(self._run, n) for n in range(number)
        ]

    def ends(self) -> list[Stream]:
        ends = [future.result(TIMEOUT_SECONDS + 30.0) for future in self._futures]
        self._pool.shutdown()
        return ends

    def _run(self, number: int) -> Stream:
        stream = Stream()
        body = completion_body(
            prompt_of(number), self._max_tokens, stream=True, return_token_ids=True
        )
        try:
            with httpx.stream("POST", self._url, json=body, timeout=TIMEOUT_SECONDS) as answer:
                for line in answer.iter_lines():
                    self._take(stream, line.removeprefix("data: "))
        except httpx.TransportError as error:
            stream.error = f"{type(error).__name__}: {error}"
        return stream

    def _take(self, stream: Stream, event: str) -> None:
        if event == "[DONE]":
            stream.is_whole = stream.error is None
        elif event:
            told = json.loads(event)
            if "error" in told:
                stream.error = told["error"]["message"]
            for choice in told.get("choices", ()):
                stream.token_ids += choice.get("token_ids") or []
