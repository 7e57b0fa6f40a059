"""ASGI middleware around everything: each request has an id, leaves one line in the log, and nothing of what it says.

Lines hold method, path, status, seconds, tokens, id and tenant. No text of a prompt, and no message of an exception of
which we do not know what it quotes, gets into a log.
"""

import re
import secrets
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.log import logger
from router_service.api_keys import Caller
from router_service.error_shapes import error_answer
from router_service.openai_errors import safe_text

REQUEST_ID_HEADER = b"x-request-id"
QUIET_PATHS = frozenset({"/health", "/health/live", "/metrics"})
"""Asked every few seconds; a line only when the answer is not 200."""
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_MAX_FRAMES = 12
_VISIT = "pointsman.visit"
_log = logger("http")


@dataclass
class Visit:
    """One request from its head to the end of its answer; filled in by those who serve it."""

    request_id: str
    caller: Caller = field(default_factory=lambda: Caller(tenant=None))
    started: float = field(default_factory=time.monotonic)
    model: str = ""
    response_id: str | None = None
    """Of the answer that is generated for it, if one is."""
    is_streamed: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_replayed_tokens: int = 0
    num_output_tokens: int = 0
    """Generated, those behind a stop string too."""
    first_token_seconds: float | None = None
    """From the head of the request to the first generated token."""
    finish_reasons: list[str] = field(default_factory=list)
    """Of the choices that have ended, in that order."""

    def begin(self, num_prompt_tokens: int) -> None:
        """Of an answer: from its prompt, perhaps not for the first time."""
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = self.num_replayed_tokens = self.num_output_tokens = 0
        self.first_token_seconds = None
        self.finish_reasons.clear()

    def count_tokens(self, num_tokens: int) -> None:
        """Just generated."""
        self.num_output_tokens += num_tokens
        if num_tokens and self.first_token_seconds is None:
            self.first_token_seconds = time.monotonic() - self.started

    def end_choice(self, finish_reason: str, *, cached_tokens: int, replayed_tokens: int) -> None:
        self.finish_reasons.append(finish_reason)
        self.num_cached_tokens += cached_tokens
        self.num_replayed_tokens += replayed_tokens


def visit_of(scope: Scope) -> Visit:
    """Of a request that came through `Visits`."""
    visit: Visit = scope[_VISIT]
    return visit


def visit_or_none(scope: Scope) -> Visit | None:
    """None of one that did not get as far as `Visits`."""
    visit: Visit | None = scope.get(_VISIT)
    return visit


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's own where it is short and plain, else a new one."""
    given = next((value for name, value in headers if name == REQUEST_ID_HEADER), b"")
    if _SANE_ID.fullmatch(given):
        return given.decode("ascii")
    return f"req-{secrets.token_hex(16)}"


class Visits:
    def __init__(self, app: ASGIApp, *, logs_access: bool) -> None:
        self._app = app
        self._logs_access = logs_access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = Visit(request_id_of(scope["headers"]))
        scope[_VISIT] = visit
        answer = _Answer(send, visit.request_id)
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            _log.error("request failed request_id=%s error=%s", visit.request_id, _origin(error))
            if answer.status is None:
                await error_answer(error, scope["path"])(scope, receive, answer.send)
        finally:
            if self._logs_access and _is_told(scope["path"], answer.status):
                _tell(scope, visit, answer, time.monotonic() - visit.started)


class _Answer:
    """Adds the id to an answer and remembers how far it got."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._header = (REQUEST_ID_HEADER, request_id.encode("ascii"))
        self.status: int | None = None
        self.is_whole = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), self._header]}
        await self._send(message)
        if message["type"] == "http.response.body":
            self.is_whole = not message.get("more_body", False)


def _is_told(path: str, status: int | None) -> bool:
    return status != 200 or path not in QUIET_PATHS


def _tell(scope: Scope, visit: Visit, answer: _Answer, seconds: float) -> None:
    _log.info(
        "request method=%s path=%s status=%s whole=%s seconds=%.3f prompt_tokens=%d "
        "completion_tokens=%d request_id=%s tenant=%s",
        scope["method"],
        safe_text(scope["path"]),
        answer.status or "none",
        "yes" if answer.is_whole else "no",
        seconds,
        visit.num_prompt_tokens,
        visit.num_output_tokens,
        visit.request_id,
        visit.caller.tenant or "-",
    )


def _origin(error: BaseException) -> str:
    """Types and places of an exception and of its causes, without their messages: those may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
    places = " ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}:{f.name}" for f in frames)
    cause = error.__cause__ or error.__context__
    told = f"{type(error).__name__} at {places}"
    return told if cause is None else f"{told}; after {type(cause).__name__}"
