"""Traces of requests by OpenTelemetry's own instrumentation, for who asks for them; otherwise none of it is imported.

A span holds method, path, status, ids and numbers of tokens (GenAI semantic conventions), and nothing of a body.
"""

import importlib.util
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import ConfigError
from router_service.visits import QUIET_PATHS, Visit, visit_or_none

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SHUTDOWN_SECONDS = 2.0
"""For the spans that are left at the end; a receiver that does not take them by then loses them."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_MODULES = ("opentelemetry.instrumentation.asgi", "opentelemetry.exporter.otlp.proto.http")
_QUERY = "pointsman.query_string"


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


def trace_environment(
    flag: bool,
    environment: Mapping[str, str],
    installed: Callable[[str], bool] = is_installed,
) -> dict[str, str] | None:
    """What traces are configured by, or None where they are not asked for: by --tracing or by an endpoint in the
    environment; OTEL_SDK_DISABLED and OTEL_TRACES_EXPORTER=none win.

    Raises ConfigError when what it takes is not installed, or another exporter or protocol is asked for.
    """
    given = [name for name in _ENDPOINTS if environment.get(name)]
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporter = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    if disabled or exporter == "none" or not (flag or given):
        return None
    if exporter != "otlp":
        raise ConfigError(f"OTEL_TRACES_EXPORTER={exporter}: traces are sent by otlp, or none")
    for name in _PROTOCOLS:
        protocol = environment.get(name) or "http/protobuf"
        if protocol != "http/protobuf":
            raise ConfigError(f"{name}={protocol}: traces are sent by http/protobuf only")
    if not all(map(installed, _MODULES)):
        raise ConfigError(
            f"{'--tracing' if flag else given[0]}: traces need packages that are not installed: "
            "pip install 'pointsman[tracing]'"
        )
    return {name: value for name, value in environment.items() if name.startswith("OTEL_")}


def otlp_provider(version: str) -> "TracerProvider":
    """Sends spans where the OTEL_* environment says, from a thread of its own and out of a queue with a bound."""
    # only a process that was asked for traces pays for these
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ours = Resource.create({"service.name": "pointsman", "service.version": version})
    provider = TracerProvider(
        resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Tracing:
    """Owner of a provider of tracers."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app` lets no exception out: a span would record its message."""
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware  # as above
        from opentelemetry.util.http import parse_excluded_urls

        middleware: ASGIApp = OpenTelemetryMiddleware(
            _TellSpan(app),
            excluded_urls=parse_excluded_urls(",".join(f"{p}$" for p in sorted(QUIET_PATHS))),
            tracer_provider=self._provider,
            exclude_spans=["receive", "send"],  # one per event of a stream
        )
        return _WithoutQuery(middleware)

    def close(self) -> None:
        """Sends what is left, in bounded time."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(SHUTDOWN_SECONDS)


class _WithoutQuery:
    """The instrumentation records the whole address; what follows the path may be anything."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "query_string": b"", _QUERY: scope["query_string"]}
        await self._app(scope, receive, send)


class _TellSpan:
    """What became of a visit, told to the span around it before that ends with the last byte of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        from opentelemetry import trace  # as above

        span = trace.get_current_span()
        scope = {**scope, "query_string": scope[_QUERY]}

        def tell() -> None:
            visit = visit_or_none(scope)
            if visit is not None and span.is_recording():
                span.set_attributes(attributes_of(visit, scope["path"]))

        async def told(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                tell()
            await send(message)

        try:
            await self._app(scope, receive, told)
        finally:
            tell()


def attributes_of(visit: Visit, path: str) -> dict[str, Any]:
    """Names of https://opentelemetry.io/docs/specs/semconv/gen-ai where there is one; pointsman.* for the rest."""
    told: dict[str, Any] = {"pointsman.request_id": visit.request_id}
    if visit.caller.tenant is not None:
        told["pointsman.tenant"] = visit.caller.tenant
    if visit.response_id is None:
        return told
    told |= {
        "gen_ai.operation.name": "text_completion" if path == "/v1/completions" else "chat",
        "gen_ai.provider.name": "pointsman",
        "gen_ai.request.model": visit.model,
        "gen_ai.request.stream": visit.is_streamed,
        "gen_ai.response.id": visit.response_id,
        "gen_ai.response.model": visit.model,
        "gen_ai.response.finish_reasons": list(visit.finish_reasons),
        "gen_ai.usage.input_tokens": visit.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": visit.num_cached_tokens,
        "gen_ai.usage.output_tokens": visit.num_output_tokens,
        "pointsman.usage.replayed_tokens": visit.num_replayed_tokens,
    }
    if visit.first_token_seconds is not None:
        told["pointsman.time_to_first_token_seconds"] = visit.first_token_seconds
        if visit.is_streamed:
            told["gen_ai.response.time_to_first_chunk"] = visit.first_token_seconds
    return told
