"""ASGI middleware for a port without keys on loopback: whoever asks names it by address or as localhost.

A web page can make a browser on this host ask such a port, under a name of the page's own that it has resolve to
127.0.0.1 (DNS rebinding). An address cannot be such a name.
"""

from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import RequestError
from router_service.error_shapes import error_answer


class OnlyLocalNames:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if not is_local_name(host):
                error = RequestError(
                    f"Host {host[:100]!r}: without --admin-key-file this port is asked by its "
                    "address or as localhost"
                )
                await error_answer(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_local_name(host: str) -> bool:
    """Of a Host header, with or without a port."""
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdecimal():
        name = host
    name = name.lower()
    if name == "localhost":
        return True
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
