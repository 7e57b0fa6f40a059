"""Traces of requests: what a span says, what none may say, and that answers do not depend on who receives them."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.errors import ConfigError
from router_service.api_keys import parse_api_keys
from router_service.tracing import trace_environment
from tests.helpers.scripted_engine import ScriptedEngine, wait_until
from tests.helpers.trace_receiver import attributes, trace_receiver
from tests.router_service.http.helpers import (
    CHAT,
    COMPLETIONS,
    assert_serves,
    chat_body,
    completion_body,
    events,
    running_server,
    tokens,
)

SECRET = "Xyzzy"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {
    "authorization": "Bearer key",
    "x-request-id": "ours",
    "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01",
}
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


def in_memory(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def client(exporter: InMemorySpanExporter) -> Iterator[httpx.Client]:
    engine = ScriptedEngine(
        token_ids=tokens(" one two three"), cached_tokens=16, replayed_tokens=32
    )
    with (
        engine,
        running_server(
            engine,
            tracer_provider=lambda: in_memory(exporter),
            api_keys=parse_api_keys("tenant key", "keys"),
        ) as (client, _),
    ):
        yield client


def span_of(exporter: InMemorySpanExporter) -> Any:
    """The one that has ended since the last call."""
    wait_until(lambda: len(exporter.get_finished_spans()) > 0)
    (span,) = exporter.get_finished_spans()
    exporter.clear()
    return span


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_has_tokens_and_times_of_an_answer_and_goes_on_with_the_clients_trace(
    stream: bool, client: httpx.Client, exporter: InMemorySpanExporter
) -> None:
    asked = completion_body(stream=stream, max_tokens=3, n=2)
    answer = client.post(COMPLETIONS, json=asked, headers=HEADERS)
    response_id = (events(answer)[0] if stream else answer.json())["id"]
    span = span_of(exporter)
    assert span.name == f"POST {COMPLETIONS}"
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    told = dict(span.attributes)
    seconds = told.pop("pointsman.time_to_first_token_seconds")
    assert 0 < seconds < (span.end_time - span.start_time) / 1e9
    assert told.pop("gen_ai.response.time_to_first_chunk", None) == (seconds if stream else None)
    ours = {name: v for name, v in told.items() if name.startswith(("gen_ai.", "pointsman."))}
    assert ours == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "pointsman",
        "gen_ai.request.model": "demo",
        "gen_ai.request.stream": stream,
        "gen_ai.response.id": response_id,
        "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": len(tokens("hello")),
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.output_tokens": 6,
        "pointsman.usage.replayed_tokens": 32,
        "pointsman.request_id": "ours",
        "pointsman.tenant": "tenant",
    }
    assert told["http.status_code"] == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (chat_body(messages=[{"role": "user", "content": SECRET}], user=SECRET), 200),
        (chat_body(messages=[{"role": "user", "content": SECRET}], stream=True), 200),
        (chat_body(messages=[{"role": SECRET, "content": SECRET}]), 400),
        (chat_body(model=SECRET), 404),
    ],
)
def test_no_span_holds_text_of_a_body_or_a_parameter_or_a_key(
    body: dict[str, Any], status: int, client: httpx.Client, exporter: InMemorySpanExporter
) -> None:
    headers = {"authorization": "Bearer key", "x-other": SECRET}
    answer = client.post(CHAT, params={"q": SECRET}, json=body, headers=headers)
    assert answer.status_code == status
    span = span_of(exporter)
    assert span.attributes["http.status_code"] == status
    told = span.to_json()
    assert SECRET not in told
    assert "Bearer" not in told
    assert "one two" not in told


def test_who_leaves_ends_the_span(client: httpx.Client, exporter: InMemorySpanExporter) -> None:
    body = completion_body(stream=True, max_tokens=200)
    with client.stream("POST", COMPLETIONS, json=body, headers=HEADERS) as answer:
        next(answer.iter_lines())
    assert span_of(exporter).attributes["gen_ai.usage.input_tokens"] == len(tokens("hello"))


def test_probes_leave_no_span(client: httpx.Client, exporter: InMemorySpanExporter) -> None:
    for path in ("/health", "/health/live", "/metrics"):
        assert client.get(path).status_code == 200
    client.get("/version")
    assert span_of(exporter).name == "GET /version"


def otlp(endpoint: str) -> TracerProvider:
    provider = TracerProvider(
        resource=Resource.create({"service.name": "tested"}), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces", timeout=0.5)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=60_000))
    return provider


def test_what_is_left_at_the_end_is_sent(engine: ScriptedEngine) -> None:
    with trace_receiver() as receiver:
        with running_server(engine, tracer_provider=lambda: otlp(receiver.endpoint)) as (client, _):
            assert_serves(client)
            assert receiver.spans == []
        ((span, resource),) = receiver.spans
    assert attributes(resource)["service.name"] == "tested"
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["length"]


def test_a_receiver_that_is_down_harms_nobody(engine: ScriptedEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with running_server(engine, tracer_provider=lambda: otlp(endpoint)) as (client, _):
            assert_serves(client)
            assert_serves(client)


@pytest.mark.parametrize(
    ("flag", "environment"),
    [
        (False, {}),
        (False, {"OTEL_SERVICE_NAME": "a"}),
        (False, ENDPOINT | {"OTEL_SDK_DISABLED": "true"}),
        (True, {"OTEL_TRACES_EXPORTER": "none"}),
    ],
)
def test_without_being_asked_there_are_no_traces(flag: bool, environment: dict[str, str]) -> None:
    assert trace_environment(flag, environment, lambda _: False) is None


@pytest.mark.parametrize(
    ("flag", "environment"),
    [
        (True, {}),
        (False, ENDPOINT),
        (False, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x/v1/traces"}),
        (True, {"OTEL_SERVICE_NAME": "a"}),
    ],
)
def test_the_flag_or_an_endpoint_asks_for_traces(flag: bool, environment: dict[str, str]) -> None:
    assert trace_environment(flag, environment | {"HOME": "/"}) == environment


@pytest.mark.parametrize(
    ("flag", "environment", "reason"),
    [
        (True, {}, r"--tracing: traces need packages .*: pip install 'pointsman\[tracing\]'"),
        (False, ENDPOINT, r"OTEL_EXPORTER_OTLP_ENDPOINT: traces need packages that are not"),
        (True, {"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER=zipkin: traces are sent"),
        (
            False,
            ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc: traces are sent by http/protobuf only",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(
    flag: bool, environment: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        trace_environment(flag, environment, lambda _: False)


def test_without_traces_nothing_of_theirs_is_imported() -> None:
    code = (
        "import sys\n"
        "import router_service.http_server\n"
        "heavy = ('opentelemetry.sdk', 'opentelemetry.instrumentation', 'opentelemetry.exporter')\n"
        "sys.exit([name for name in sys.modules if name.startswith(heavy)] or 0)"
    )
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False)
    assert ended.returncode == 0
