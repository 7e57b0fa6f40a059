"""ASGI middleware: who may ask, and in whose name. Every path needs a key but those that are left open."""

from starlette.types import ASGIApp, Receive, Scope, Send

from router_service.api_keys import ApiKeys, given_key
from router_service.error_shapes import error_answer
from router_service.openai_errors import ApiKeyError
from router_service.visits import visit_of

OPEN_PATHS = frozenset({"/health", "/health/live", "/metrics", "/version"})
"""Of the API port: what probes and scrapers ask."""


class RequireApiKey:
    def __init__(
        self, app: ASGIApp, keys: ApiKeys, *, kind: str, open_paths: frozenset[str]
    ) -> None:
        """kind: of the keys, as a client is told that its own will not do"""
        self._app = app
        self._keys = keys
        self._kind = kind
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            caller = self._keys.caller_of(given_key(dict(scope["headers"])))
            if caller is None:
                error = ApiKeyError(
                    f"wrong or missing {self._kind} key; send Authorization: Bearer KEY, or x-api-key: KEY"
                )
                await error_answer(error, scope["path"])(scope, receive, send)
                return
            visit_of(scope).caller = caller
        await self._app(scope, receive, send)
