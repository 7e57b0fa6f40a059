"""What all locust users here share: one streamed request and its events, the arguments, the report at the end.

Importing this imports locust, which patches the standard library of the process: only locustfiles do.
"""

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import urllib3
from locust import User, events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import LocalRunner
from locust.stats import StatsError

from loadtest.answer import Answer, AnswerFailed, TokenCounts, read_answer
from loadtest.report import FULL, ITL, LATE, TTFT, LatencyRow, LoadReport, to_json, to_markdown
from loadtest.workload import PromptRequest

CONNECT_SECONDS = 10.0
READ_SECONDS = 120.0
"""Longest silence inside a stream, and before it."""
_KINDS = (FULL, TTFT, ITL, LATE)
_CHUNK_BYTES = 65536


class Load:
    """What the users of one locust process share. Owner of the numbering of requests and of the sums of tokens."""

    def __init__(self, host: str, options: argparse.Namespace) -> None:
        """Asks the server for its model. Raises urllib3's HTTPError, ValueError."""
        self.host = host.rstrip("/")
        self.options = options
        self.headers = _headers(options.api_key_file)
        self.numbers = itertools.count()
        self.tokens: dict[str, TokenCounts] = {}
        served = _served_model(self.host, self.headers)
        self.model = options.model or served.id
        self.context_tokens = options.context_tokens or served.max_model_len or 2048

    def count(self, user: str, tokens: TokenCounts) -> None:
        self.tokens[user] = self.tokens.get(user, TokenCounts()) + tokens


class _ServedModel(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ServedModels(msgspec.Struct):
    data: list[_ServedModel]


def _served_model(host: str, headers: dict[str, str]) -> _ServedModel:
    answer = urllib3.request(
        "GET", f"{host}/v1/models", headers=headers, timeout=CONNECT_SECONDS, retries=False
    )
    models = msgspec.json.decode(answer.data, type=_ServedModels).data
    if not models:
        raise ValueError("the server has no model")
    return models[0]


def _headers(api_key_file: Path | None) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if api_key_file is not None:
        headers["authorization"] = f"Bearer {_first_key(api_key_file.read_text())}"
    return headers


def _first_key(text: str) -> str:
    """Of a file of keys as `pointsman serve` reads it. Raises ValueError."""
    lines = [line.split() for line in text.splitlines()]
    keys = [words[-1] for words in lines if words and not words[0].startswith("#")]
    if not keys:
        raise ValueError("the API key file holds no key")
    return keys[0]


class StreamingUser(User):
    """Owner of one connection. Sends one request after the other; `load` is set before the first user is made."""

    abstract = True
    load: ClassVar[Load]

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._pool = urllib3.PoolManager(
            maxsize=1,
            headers=self.load.headers,
            retries=False,
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
        )

    def on_stop(self) -> None:
        self._pool.clear()

    def complete(self, user: str, request: PromptRequest) -> Answer | None:
        """None if it failed. `ignore_eos` is not OpenAI's, but all servers of open models know it."""
        body = {
            "prompt": request.prompt_token_ids,
            "max_tokens": request.num_output_tokens,
            "ignore_eos": True,
        }
        return self.ask(user, "/v1/completions", body)

    def ask(self, user: str, path: str, fields: dict[str, Any]) -> Answer | None:
        """Sends, reads to the end, and reports: a `full` event, and unless it failed `ttft`, `itl`s and tokens."""
        body = fields | {
            "model": self.load.model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()

        def clock() -> float:
            return time.perf_counter() - started

        try:
            answer = self._stream(path, msgspec.json.encode(body), clock)
        except (AnswerFailed, urllib3.exceptions.HTTPError) as error:
            self.report(FULL, user, clock(), error)
            return None
        self.report(FULL, user, clock())
        self.report(TTFT, user, answer.first_seconds)
        for seconds in answer.gap_seconds:
            self.report(ITL, user, seconds)
        self.load.count(user, answer.tokens)
        return answer

    def _stream(self, path: str, body: bytes, clock: Callable[[], float]) -> Answer:
        with self._pool.request(
            "POST", f"{self.load.host}{path}", body=body, preload_content=False
        ) as response:
            if response.status != 200:
                text = response.read().decode(errors="replace")
                raise AnswerFailed(f"status {response.status}: {text[:500]}")
            return read_answer(response.stream(_CHUNK_BYTES), clock)

    def report(
        self, kind: str, user: str, seconds: float, failure: Exception | None = None
    ) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=user,
            response_time=1000 * seconds,
            response_length=0,
            exception=failure,
            context=self.context(),
        )


@events.init_command_line_parser.add_listener
def _add_arguments(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--model",
        default="",
        help="its name in the API (default: the first one that the server has)",
    )
    group.add_argument(
        "--context-tokens",
        type=int,
        default=0,
        metavar="N",
        help="no request is longer (default: what the server says, else 2048)",
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="first line: the bearer token"
    )
    group.add_argument(
        "--workload-seed", type=int, default=0, metavar="N", help="same seed, same workload"
    )
    group.add_argument("--report-file", type=Path, metavar="FILE", help="where the results go as JSON")  # fmt: skip


@events.init.add_listener
def _prepare(environment: Environment, **_: object) -> None:
    options = environment.parsed_options
    if options is None or environment.host is None:
        sys.exit("loadtest: say which server with --host URL")
    if not isinstance(environment.runner, LocalRunner):
        sys.exit("loadtest: tokens are counted in one process; run without --master and --worker")
    try:
        StreamingUser.load = Load(environment.host, options)
    except (urllib3.exceptions.HTTPError, ValueError, OSError) as error:
        sys.exit(f"loadtest: {environment.host}: {error}")


@events.quitting.add_listener
def _report(environment: Environment, **_: object) -> None:
    report = _load_report(environment, StreamingUser.load)
    print(f"\n{to_markdown(report)}", flush=True)
    file: Path | None = StreamingUser.load.options.report_file
    if file is not None:
        file.write_bytes(to_json(report))


def _load_report(environment: Environment, load: Load) -> LoadReport:
    stats = environment.stats
    seconds = (stats.last_request_timestamp or stats.start_time) - stats.start_time
    return LoadReport(
        host=load.host,
        model=load.model,
        num_users=load.options.num_users or 0,
        seconds=round(seconds, 1),
        rows=[
            LatencyRow(
                kind=kind,
                user=user,
                count=entry.num_requests,
                failures=entry.num_failures,
                p50=entry.get_response_time_percentile(0.5),
                p90=entry.get_response_time_percentile(0.9),
                p99=entry.get_response_time_percentile(0.99),
                max=entry.max_response_time,
            )
            for (user, kind), entry in sorted(
                stats.entries.items(), key=lambda item: (item[0][0], _KINDS.index(item[0][1]))
            )
        ],
        tokens=load.tokens,
        errors=_error_counts(stats.errors.values()),
    )


def _error_counts(errors: Iterable[StatsError]) -> dict[str, int]:
    """By message: locust keeps one entry per kind of user."""
    counts: Counter[str] = Counter()
    for error in errors:
        counts[str(error.error)] += error.occurrences
    return dict(counts)
