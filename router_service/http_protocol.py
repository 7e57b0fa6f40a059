"""uvicorn's HTTP/1.1 with JSON also for what never becomes a request: bytes that are not HTTP."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.errors import RequestError
from router_service.openai_errors import error_body, json_response


class JsonErrorProtocol(HttpToolsProtocol):
    """One parser everywhere (httptools), whatever else is installed. It calls `send_400_response` once and expects the
    transport to be closed."""

    def send_400_response(self, msg: str) -> None:
        refused = RequestError(f"{msg} Send HTTP/1.1 with well-formed headers.")
        answer = json_response(error_body(refused), status=400, headers={"connection": "close"})
        lines = [b"HTTP/1.1 400 Bad Request", *(b": ".join(pair) for pair in answer.raw_headers)]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()
