"""Errors as OpenAI clients know them: {"error": {"message", "type", "param", "code"}} and the HTTP status of each kind.

The only mapping from our exception tree to HTTP. Messages are made of validated text, and `safe_text` makes any other
text encodable and short before it enters one.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from cluster.errors import (
    CellError,
    ConflictError,
    DeadlineError,
    OverloadedError,
    PointsmanError,
    RequestError,
    UnknownModelError,
    WeightsChangedError,
)

_MAX_QUOTED = 80
"""Characters of a user's value that an error message repeats."""


class ContextLengthError(RequestError):
    """Prompt and max_tokens do not fit the context."""


class BodyTooLargeError(RequestError):
    """The body is over the configured limit (HTTP 413)."""


class BusyError(CellError):
    """The HTTP server holds as much as it may (HTTP 503)."""


class SlowRequestError(RequestError):
    """The request did not arrive in time (HTTP 408)."""


class HeadTooLargeError(RequestError):
    """The request's headers are over the limit (HTTP 431)."""


class ApiKeyError(RequestError):
    """The API key is missing or wrong (HTTP 401)."""


class NoSuchRouteError(RequestError):
    """No endpoint has this path (HTTP 404)."""


class MethodError(RequestError):
    """The endpoint does not take this method (HTTP 405)."""


@dataclass(frozen=True)
class _Kind:
    status: int
    type: str
    code: str | None


_KINDS: Mapping[type[Exception], _Kind] = {
    ContextLengthError: _Kind(400, "invalid_request_error", "context_length_exceeded"),
    BodyTooLargeError: _Kind(413, "invalid_request_error", "request_too_large"),
    SlowRequestError: _Kind(408, "invalid_request_error", "request_timeout"),
    HeadTooLargeError: _Kind(431, "invalid_request_error", "headers_too_large"),
    ApiKeyError: _Kind(401, "invalid_request_error", "invalid_api_key"),
    NoSuchRouteError: _Kind(404, "invalid_request_error", "not_found"),
    MethodError: _Kind(405, "invalid_request_error", "method_not_allowed"),
    UnknownModelError: _Kind(404, "invalid_request_error", "model_not_found"),
    OverloadedError: _Kind(429, "rate_limit_error", "overloaded"),
    ConflictError: _Kind(409, "invalid_request_error", "conflict"),
    RequestError: _Kind(400, "invalid_request_error", None),
    DeadlineError: _Kind(503, "server_error", "deadline_exceeded"),
    WeightsChangedError: _Kind(503, "server_error", "weights_changed"),
    BusyError: _Kind(503, "server_error", "overloaded"),
    CellError: _Kind(503, "server_error", "unavailable"),
}
_INTERNAL = _Kind(500, "server_error", "internal_error")


def safe_text(value: object) -> str:
    """`value` as a Python literal for an error message: ASCII, shortened, cheap for values of any size and depth."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxlong = 3, _MAX_QUOTED, 200
    text = short.repr(value).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"


def error_body(error: Exception) -> dict[str, Any]:
    """The OpenAI error object. An exception that is not ours says nothing of its inside."""
    kind = _kind_of(error)
    message = str(error) if isinstance(error, PointsmanError) else "internal error; see the log"
    param = error.field if isinstance(error, RequestError) else None
    return {
        "error": {
            "message": message.encode("utf-8", "replace").decode(),
            "type": kind.type,
            "param": param,
            "code": kind.code,
        }
    }


def error_response(error: Exception) -> Response:
    """The whole answer: status, body, and Retry-After where waiting helps."""
    status = _kind_of(error).status
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), status=status, headers=headers)


def json_response(
    body: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


def _kind_of(error: Exception) -> _Kind:
    for ancestor in type(error).__mro__:
        if ancestor in _KINDS:
            return _KINDS[ancestor]
    return _INTERNAL
