"""`python -m tests.routes_beside_streams_table`: inter-token latency of steady streams of a served cell, while others
send long prompts and ask for their routes, or for none.

Kinds of requests take turns within one run, so that what else the machine does meets all of them. `--deep` serves a
small checkpoint with as many MoE layers and choices as a DeepSeek-V3 has, whose routes are as large per token.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.served import Served
from tests.helpers.tiny_checkpoints import write_tiny_checkpoint
from tests.integration.api import CellApi, completion_body, random_prompt

DEEP: dict[str, Any] = {
    "num_hidden_layers": 59,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
}
"""One layer without experts, 58 with them."""
KINDS: dict[str, dict[str, Any] | None] = {
    "no other requests": None,
    "no routes": {},
    "ids": {"return_routed_experts": True},
    "ids and weights": {"return_routed_experts": "weights"},
}
STREAM_TOKENS = 600
STOP_SECONDS = 60.0
PLAIN_SECONDS = 1.0
"""Of a turn without other requests."""
HEAD = (
    "| others ask for | answers | MB each | tokens of streams | ITL p50, ms | ITL p99, ms | "
    "longest while one is answered: p50, ms | max, ms |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass
class Meanwhile:
    """Gaps of all streams, in seconds, while each of these requests was answered (or nobody asked, for a while)."""

    sizes: list[int] = field(default_factory=list)
    """Bytes of the answers."""
    gaps: list[list[float]] = field(default_factory=list)
    """By request."""


class SteadyStreams:
    """Owner of threads that stream until they are told to stop. `gaps`: (when, seconds since the token before)."""

    def __init__(self, served: Served, count: int) -> None:
        self._url = f"{served.base_url}/v1/completions"
        self._model = served.model
        self._stop = threading.Event()
        self.gaps: list[tuple[float, float]] = []
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]

    def __enter__(self) -> "SteadyStreams":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def between(self, start: float, end: float) -> list[float]:
        return [seconds for when, seconds in self.gaps if start <= when <= end]

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=60.0) as client:
            while not self._stop.is_set():
                self._stream(client, number)

    def _stream(self, client: httpx.Client, number: int) -> None:
        body = completion_body(random_prompt(number, 24), STREAM_TOKENS, stream=True)
        last: float | None = None
        with client.stream("POST", self._url, json=body | {"model": self._model}) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                if last is not None:
                    self.gaps.append((now, now - last))
                last = now
                if self._stop.is_set():
                    return


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.routes_beside_streams_table")
    parser.add_argument("--ep-size", type=int, default=4)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=12, help="turns of each kind")
    parser.add_argument("--requests", type=int, default=2, help="of each turn, one after the other")
    parser.add_argument("--deep", action="store_true")
    options = parser.parse_args(arguments)
    with (
        served_model(options) as served,
        CellApi(served.base_url, served.admin_url) as api,
        SteadyStreams(served, options.streams) as streams,
    ):
        told = measured(api, served.model, streams, options)
    print(HEAD)
    for name, meanwhile in told.items():
        print(row(name, meanwhile))
    return 0


@contextmanager
def served_model(options: argparse.Namespace) -> Iterator[Served]:
    flags = ["--ep-size", str(options.ep_size)]
    with tempfile.TemporaryDirectory() as directory:
        if options.deep:
            model = write_tiny_checkpoint(Path(directory) / "deep", seed=1, **DEEP)
            flags += ["--model", str(model)]
        with Served(*flags) as served:
            served.wait_until_ready(seconds=330.0)
            yield served
            served.interrupt()
            served.wait(STOP_SECONDS)


def measured(
    api: CellApi, model: str, streams: SteadyStreams, options: argparse.Namespace
) -> dict[str, Meanwhile]:
    """By kind."""
    told = {name: Meanwhile() for name in KINDS}
    seeds = itertools.count(1000)
    time.sleep(2 * PLAIN_SECONDS)  # all streams flow
    for _ in range(options.repeats):
        for name, fields in KINDS.items():
            for _ in range(options.requests if fields is not None else 1):
                started = time.perf_counter()
                if fields is None:
                    time.sleep(PLAIN_SECONDS)
                else:
                    prompt = random_prompt(next(seeds), options.prompt_tokens)
                    told[name].sizes.append(answer_bytes(api, model, prompt, fields))
                told[name].gaps.append(streams.between(started, time.perf_counter()))
    return told


def answer_bytes(api: CellApi, model: str, prompt: list[int], fields: dict[str, Any]) -> int:
    body = completion_body(prompt, 1, **fields) | {"model": model}
    answer = api.http.post(f"{api.base_url}/v1/completions", content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    return len(answer.content)


def row(name: str, meanwhile: Meanwhile) -> str:
    """The longest gap of each answer counts, because a larger answer comes some steps later, which are short."""
    sizes = meanwhile.sizes
    gaps = sorted(gap for of_one in meanwhile.gaps for gap in of_one)
    longest = [max(of_one) for of_one in meanwhile.gaps if of_one]
    size = f"{statistics.mean(sizes) / 1e6:.2f}" if sizes else ""
    p99 = gaps[int(0.99 * (len(gaps) - 1))]
    told = (statistics.median(gaps), p99, statistics.median(longest), max(longest))
    latencies = " | ".join(f"{1e3 * seconds:.0f}" for seconds in told)
    return f"| {name} | {len(sizes)} | {size} | {len(gaps):,} | {latencies} |"


if __name__ == "__main__":
    sys.exit(main())
