"""Which API's shape an error has: that of the path which was asked."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from cluster.errors import WeightsChangedError
from router_service.openai_errors import error_body, error_response, json_response

ANTHROPIC_PATH = "/v1/messages"

_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def error_answer(error: Exception, path: str) -> Response:
    """The whole answer for what was asked at `path`."""
    answer = error_response(error)
    if path != ANTHROPIC_PATH and not path.startswith(f"{ANTHROPIC_PATH}/"):
        return answer
    headers = {k: v for k, v in answer.headers.items() if not k.startswith("content-")}
    return json_response(anthropic_error_body(error), status=answer.status_code, headers=headers)


def anthropic_error_body(error: Exception) -> dict[str, Any]:
    """{"type": "error", "error": {"type", "message"}}."""
    status = error_response(error).status_code
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message_with_code(error)}}


def message_with_code(error: Exception) -> str:
    """For shapes whose codes are others: a program that asks again when the weights have changed tells it by the code,
    so the message begins with it."""
    said = error_body(error)["error"]
    message: str = said["message"]
    return f"{said['code']}: {message}" if isinstance(error, WeightsChangedError) else message
