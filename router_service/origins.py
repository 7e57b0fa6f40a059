"""Web pages that may ask from a browser (CORS). None by default."""

import re
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from cluster.errors import ConfigError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:\d{1,5})?")
_SHOWN_HEADERS = ["x-request-id", "retry-after"]


def check_origins(origins: Sequence[str]) -> None:
    """Raises ConfigError for what no browser would send."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin {origin!r}: must be * or as browsers send it: scheme://host, with "
                ":port where it is not the usual one, in lower case and without a path"
            )


def open_to(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """No cookies: who may ask is the key's to say."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=_SHOWN_HEADERS,
    )
