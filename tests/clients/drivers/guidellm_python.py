"""GuideLLM's own command with synthetic prompts: no error, and it reads and counts what the server says."""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asked_again import asked_again
from checking import Json, Server, TokenCounts, run_checks, same, some
from commands import run_command

NUM_REQUESTS, STREAMS = 8, 4
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 16


def benchmark_with(path: str, *, turns: int = 1, stream: bool = True) -> Callable[[Server], None]:
    def benchmark(server: Server) -> None:
        before = server.token_counts()
        report = report_of(server, path, turns=turns, stream=stream)
        counted = server.token_counts() - before
        requests = report["requests"]["successful"]
        same_totals(report, len(requests), turns)
        same_counts(requests, counted)
        for request in requests:
            has_times(request, stream)
            wanted = asked_again(server, path, json.loads(request["request_args"])["body"])
            same(request["output"], wanted.text, "the text")
            same(request["prompt_tokens"], wanted.prompt_tokens, "the prompt's tokens")
            same(wanted.output_tokens, OUTPUT_TOKENS, "the answer's tokens")

    return benchmark


def report_of(server: Server, path: str, *, turns: int, stream: bool) -> Json:
    """Of its one benchmark."""
    backend = {
        "kind": "openai_http",
        "target": server.url,
        "model": server.model,
        "api_key": server.api_key,
        "request_format": path,
        "stream": str(stream).lower(),
        "extras.body.temperature": 0,
    }
    data = {
        "kind": "synthetic_text",
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "turns": turns,
    }
    with tempfile.TemporaryDirectory(prefix="guidellm-") as directory:
        file = Path(directory) / "report.json"
        run_command(
            "guidellm",
            [
                *("run", "--backend", _flag(backend), "--data", _flag(data)),
                *("--tokenizer", _flag({"kind": "hf_auto", "model": server.tokenizer_dir})),
                *("--profile", _flag({"kind": "concurrent", "streams": STREAMS})),
                *("--constraint", _flag({"kind": "max_requests", "count": NUM_REQUESTS})),
                *("--output", _flag({"kind": "json", "path": file}), "--disable-console"),
            ],
            Path(directory),
        )
        (benchmark,) = json.loads(file.read_text())["benchmarks"]
        report: Json = benchmark
        return report


def _flag(values: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())


def same_totals(report: Json, num_requests: int, turns: int) -> None:
    """At its limit it stops, perhaps in the middle of conversations."""
    totals = report["metrics"]["request_totals"]
    same((totals["errored"], totals["incomplete"]), (0, 0), "requests that failed or did not end")
    same(totals["successful"], num_requests, "the requests that it lists")
    fewest = NUM_REQUESTS if turns == 1 else NUM_REQUESTS - STREAMS
    same(fewest <= num_requests <= NUM_REQUESTS, True, f"that {num_requests} is the number asked")


def same_counts(requests: list[Json], counted: TokenCounts) -> None:
    """With the server's metrics."""
    for name, number in (
        ("output_tokens", counted.generated),
        ("prompt_tokens", counted.prompt),
        ("cached_tokens", counted.cached),
    ):
        same(sum(request[name] or 0 for request in requests), number, f"the sum of {name}")
    same({request["output_tokens"] for request in requests}, {OUTPUT_TOKENS}, "output_tokens")


def has_times(request: Json, stream: bool) -> None:
    names = ["request_latency"]
    if stream:
        names += ["time_to_first_token_ms", "inter_token_latency_ms"]
    for name in names:
        some(request[name] and request[name] > 0, name)


CHECKS = [
    ("chats", benchmark_with("/v1/chat/completions")),
    ("chats of two turns", benchmark_with("/v1/chat/completions", turns=2)),
    ("chats, not streamed", benchmark_with("/v1/chat/completions", stream=False)),
    ("completions", benchmark_with("/v1/completions")),
    ("responses", benchmark_with("/v1/responses")),
]

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
