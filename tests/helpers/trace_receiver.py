"""Where traces are sent to: a small server that takes OTLP over HTTP, as any collector does, and keeps the spans."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class TraceReceiver:
    """spans: as they came, with the resource of each."""

    def __init__(self) -> None:
        self._spans: list[tuple[Any, Any]] = []
        self._lock = threading.Lock()
        self.endpoint = ""

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._lock:
            self._spans += [
                (span, sent.resource)
                for sent in request.resource_spans
                for scope in sent.scope_spans
                for span in scope.spans
            ]

    @property
    def spans(self) -> list[tuple[Any, Any]]:
        with self._lock:
            return list(self._spans)


@contextmanager
def trace_receiver() -> Iterator[TraceReceiver]:
    receiver = TraceReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.take(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


def attributes(holder: Any) -> dict[str, Any]:
    """Of a span or a resource, as plain values."""
    return {pair.key: _plain(pair.value) for pair in holder.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind)
