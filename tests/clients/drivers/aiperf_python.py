"""AIPerf's own command with synthetic prompts: no error, and it reads and counts what the server says."""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asked_again import asked_again
from checking import Json, Server, TokenCounts, run_checks, same, some
from commands import run_command

NUM_REQUESTS, CONCURRENCY = 8, 4
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 16
OUTPUT = "output_sequence_length"
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
TOKENIZER = "local/tokenizer"
FULL_LENGTH: Json = {"temperature": 0, "ignore_eos": True}
SAID: Json = {
    "temperature": 0,
    "text": {"format": {"type": "json_schema", "name": "said", "schema": {"enum": ["yes, it is"]}}},
}
"""Of a response it reads the usage only where that ends by itself, so these answers do."""


def benchmark_with(
    endpoint: str, *options: str, extra: Json = FULL_LENGTH
) -> Callable[[Server], None]:
    def benchmark(server: Server) -> None:
        with tempfile.TemporaryDirectory(prefix="aiperf-") as directory:
            before = server.token_counts()
            reports = run_aiperf(server, endpoint, (*options, *_extra(extra)), Path(directory))
            counted = server.token_counts() - before
            same_summary(json.loads((reports / "profile_export_aiperf.json").read_text()))
            records = records_of(reports)
            same_counts(records, counted)
            for record in records:
                has_times(record, "--streaming" in options)
                wanted = asked_again(server, PATHS[endpoint], record.sent)
                same(record.text, wanted.text, "the text")
                counts = (record.value("input_sequence_length"), record.value(OUTPUT))
                same(counts, (wanted.prompt_tokens, wanted.output_tokens), "the counts")
                if extra is FULL_LENGTH:
                    same(wanted.output_tokens, OUTPUT_TOKENS, "the answer's tokens")
            reads_metrics(json.loads((reports / "server_metrics_export.json").read_text()))

    return benchmark


def run_aiperf(server: Server, endpoint: str, options: tuple[str, ...], directory: Path) -> Path:
    """The folder with its reports."""
    _as_cached(server.tokenizer_dir, directory / "hf" / "hub")
    reports = directory / "reports"
    run_command(
        "aiperf",
        [
            *("profile", "--model", server.model, "--url", server.url),
            *("--api-key", server.api_key, "--endpoint-type", endpoint, *options),
            *("--tokenizer", TOKENIZER, "--random-seed", "1"),
            *("--isl", str(PROMPT_TOKENS), "--isl-stddev", "0"),
            *("--osl", str(OUTPUT_TOKENS), "--osl-stddev", "0"),
            *("--request-count", str(NUM_REQUESTS), "--concurrency", str(CONCURRENCY)),
            *("--use-server-token-count", "--export-level", "raw", "--export-outputs-json"),
            *("--no-gpu-telemetry", "--ui", "none", "--artifact-dir", str(reports)),
        ],
        directory,
    )
    return reports


def _as_cached(tokenizer_dir: Path, hub: Path) -> None:
    """Offline, it takes a tokenizer by its name out of the hub's cache only, not from a folder."""
    entry = hub / f"models--{TOKENIZER.replace('/', '--')}"
    for name in ("refs", "snapshots"):
        (entry / name).mkdir(parents=True)
    (entry / "refs" / "main").write_text("here")
    (entry / "snapshots" / "here").symlink_to(tokenizer_dir)


def _extra(fields: Json) -> tuple[str, ...]:
    return ("--extra-inputs", json.dumps(fields))


@dataclass(frozen=True)
class Record:
    """One request. sent: its body."""

    text: str
    sent: Json
    metrics: Json

    def value(self, name: str) -> float:
        value: float = self.metrics[name]["value"]
        return value


def records_of(reports: Path) -> list[Record]:
    """From three of its files."""
    outputs = json.loads((reports / "outputs.json").read_text())["data"]
    texts = {output["x_request_id"]: output["response_text"] for output in outputs}
    metrics = {
        line["metadata"]["x_request_id"]: line["metrics"]
        for line in _lines(reports / "profile_export.jsonl")
    }
    return [
        Record(texts[name], line["payload"], metrics[name])
        for line in _lines(reports / "profile_export_raw.jsonl")
        for name in [line["metadata"]["x_request_id"]]
    ]


def _lines(file: Path) -> list[Json]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def same_summary(summary: Json) -> None:
    same(summary["request_count"]["avg"], NUM_REQUESTS, "request_count")
    same(summary.get("error_request_count"), None, "error_request_count")
    same(summary["error_summary"], [], "error_summary")


def same_counts(records: list[Record], counted: TokenCounts) -> None:
    """With the server's metrics."""
    same(len(records), NUM_REQUESTS, "the number of records")
    for name, number in (
        (OUTPUT, counted.generated),
        ("input_sequence_length", counted.prompt),
        ("usage_prompt_cache_read_tokens", counted.cached),
    ):
        same(sum(record.value(name) for record in records), number, f"the sum of {name}")


def has_times(record: Record, stream: bool) -> None:
    names = ["request_latency"]
    if stream:
        names += ["time_to_first_token", "inter_token_latency"]
    for name in names:
        some(record.value(name) > 0, name)


def reads_metrics(exported: Json) -> None:
    """It asks for /metrics all the time and gives counters without their ending."""
    (series,) = exported["metrics"]["pointsman_generation_tokens"]["series"]
    some(series["stats"], "the server's count of generated tokens")


CHECKS = [
    ("chats", benchmark_with("chat", "--streaming", "--per-chunk-usage")),
    ("chats, not streamed", benchmark_with("chat")),
    ("completions", benchmark_with("completions", "--streaming")),
    ("responses", benchmark_with("responses", "--streaming", extra=SAID)),
    ("messages", benchmark_with("messages", "--streaming")),
]

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
