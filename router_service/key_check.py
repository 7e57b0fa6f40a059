"""ASGI middleware: who may ask, and in whose name. Every path needs a key but those that probes and scrapers ask."""

from starlette.types import ASGIApp, Receive, Scope, Send

from router_service.api_keys import ApiKeys, Caller, given_key
from router_service.error_shapes import error_answer
from router_service.openai_errors import ApiKeyError

OPEN_PATHS = frozenset({"/health", "/health/live", "/metrics", "/version"})
_CALLER = "pointsman.caller"
_NOBODY = Caller(tenant=None)


class RequireApiKey:
    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            caller = self._keys.caller_of(given_key(dict(scope["headers"])))
            if caller is None:
                error = ApiKeyError(
                    "wrong or missing API key; send Authorization: Bearer KEY, or x-api-key: KEY"
                )
                await error_answer(error, scope["path"])(scope, receive, send)
                return
            scope[_CALLER] = caller
        await self._app(scope, receive, send)


def caller_of(scope: Scope) -> Caller:
    """Of a request that got here; the same for all where no keys are needed."""
    caller: Caller = scope.get(_CALLER, _NOBODY)
    return caller
