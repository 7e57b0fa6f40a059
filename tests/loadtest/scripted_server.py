"""An HTTP server with answers of one's own for the endpoints that a load test uses."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

MODELS = b'{"data": [{"id": "scripted", "max_model_len": 4096}]}'


@contextmanager
def scripted_server(streams: dict[str, list[bytes]]) -> Iterator[str]:
    """Its URL. A POST to a path gets that path's stream, a piece at a time."""

    class Handler(_Handler):
        answers = streams

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answers: ClassVar[dict[str, list[bytes]]]

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(MODELS)))
        self.end_headers()
        self.wfile.write(MODELS)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in [*self.answers[self.path], b""]:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""
