"""The HTTP server of a cell as one object: binds its ports, serves on a thread of its own, stops in bounded time.

It knows nothing of Ray and needs no main thread, so it runs inside an actor, a test or a plain process.
"""

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from cluster.channel_keys import PeerKeys
from cluster.errors import CellError, ConfigError
from cluster.log import logger
from router_service.admin_app import AdminApi
from router_service.api_keys import ApiKeys
from router_service.app import ApiOptions, ServiceApi
from router_service.drain import Drain
from router_service.engine_client import EngineClient
from router_service.http_protocol import ConnectionLimits, protocol_with
from router_service.key_check import OPEN_PATHS, RequireApiKey
from router_service.local_names import OnlyLocalNames
from router_service.model_parsers import BY_TEMPLATE, ParserNames
from router_service.model_text import load_model_text
from router_service.origins import open_to
from router_service.request_admission import RequestAdmission, ServedModel
from router_service.request_bodies import BodyLimits
from router_service.tls_files import TlsFiles
from router_service.tracing import Tracing
from router_service.visits import Visits

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_BACKLOG = 2048
SEND_BUFFER_BYTES = 2**18
"""What the system may hold of a connection's answer (Linux takes twice as much); left to itself it takes megabytes."""
_log = logger("http")


@dataclass(frozen=True)
class HttpServerOptions:
    model_dir: Path
    served_model_name: str
    created: int
    """The model, in Unix seconds; the same at all servers of a cell."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    engine_endpoint: str
    host: str
    port: int
    """0: any free port."""
    admin_host: str
    admin_port: int
    """0: likewise."""
    max_body_bytes: int
    version: str
    engine_keys: PeerKeys | None = None
    """See EngineClient."""
    api_keys: ApiKeys | None = None
    """None: whoever reaches the port may ask."""
    admin_keys: ApiKeys | None = None
    """Of the admin port, likewise."""
    parser_names: ParserNames = BY_TEMPLATE
    silence_seconds: float = 120.0
    """With requests open, the engine counts as lost after this long without a word."""
    outage_seconds: float = 300.0
    """So long an answer whose engine is lost waits until one goes on with it; 0: it ends with its engine."""
    weight_update_seconds: float = 1200.0
    """Longer than the engine waits for its ranks."""
    max_bodies_bytes: int = 2**28
    """See BodyLimits.max_bytes_together."""
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    cors_origins: tuple[str, ...] = ()
    logs_access: bool = True
    tracer_provider: "Callable[[], TracerProvider] | None" = None
    """Of traces of the API port; None: there are none."""
    tls: TlsFiles | None = None
    """Of both ports."""
    shares_ports: bool = False
    """Other processes of the same user may listen on both ports too; each gets a part of the connections."""


@dataclass(frozen=True)
class BoundPorts:
    port: int
    admin_port: int


class HttpServer:
    """Owner of the two listening sockets, the serving thread and the engine client that lives on it."""

    def __init__(self, options: HttpServerOptions) -> None:
        """Loads the tokenizer and what belongs to it. Raises CheckpointError."""
        self._options = options
        self._model = ServedModel(
            model_dir=options.model_dir,
            name=options.served_model_name,
            max_model_len=options.max_model_len,
            vocab_size=options.vocab_size,
            eos_token_ids=options.eos_token_ids,
            text=load_model_text(options.model_dir, options.vocab_size, options.parser_names),
        )
        self._thread = threading.Thread(target=self._run, name="http-server", daemon=True)
        self._sockets: list[socket.socket] = []
        self._listeners: list[_Listener] = []
        """Of the API and of the admin port."""
        self._drain: Drain | None = None
        self._tracing: Tracing | None = None
        self._serving: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested: asyncio.Event | None = None
        self._stop_seconds = 0.0
        self._stop_reason = ""

    def start(self, ports: BoundPorts | None = None) -> BoundPorts:
        """Binds, serves, returns the ports. Raises ConfigError when a port cannot be bound.

        ports: instead of those of the options, where a server of the same cell has or had bound them
        """
        options = self._options
        asked = ports or BoundPorts(options.port, options.admin_port)
        api = _bind(options.host, asked.port, shared=options.shares_ports)
        try:
            admin = _bind(options.admin_host, asked.admin_port, shared=options.shares_ports)
        except ConfigError:
            api.close()
            raise
        self._sockets = [api, admin]
        bound = BoundPorts(api.getsockname()[1], admin.getsockname()[1])
        self._thread.start()
        self._serving.result(timeout=60)
        parsers = self._model.text.parsers
        _log.info(
            "http server ready host=%s port=%d admin_port=%d tool_call_parser=%s reasoning_parser=%s",
            options.host,
            bound.port,
            bound.admin_port,
            parsers.call_format_name,
            parsers.reasoning or "none",
        )
        return bound

    def wait(self) -> None:
        """Blocks a started server's caller until `stop` is called from another thread.

        Raises what ended the serving thread, if it was not `stop`.
        """
        assert self._sockets, "start comes first"
        self._ended.result()

    def takes_turns(self, seconds: float) -> bool:
        """Whether the event loop takes one within that time."""
        loop = self._loop
        if loop is None or not self._thread.is_alive():
            return False
        taken = threading.Event()
        loop.call_soon_threadsafe(taken.set)
        return taken.wait(seconds)

    def drain(self, seconds: float) -> bool:
        """Takes no new connection and no new request; returns when none is open any more, or after `seconds`: whether
        none is. The admin port stays. `stop` comes next; it ends the wait too."""
        loop = self._loop
        if loop is None or not self._thread.is_alive():
            return True
        finished = asyncio.run_coroutine_threadsafe(self._finish(seconds), loop)
        try:
            return finished.result(timeout=seconds + 5.0)
        except CancelledError:
            return False

    def stop(self, seconds: float = 5.0, reason: str = "the server is stopping") -> None:
        """Ends open streams with an error event that holds `reason` and closes the listeners, within about
        `seconds`. Idempotent."""
        loop, stop_requested = self._loop, self._stop_requested
        if loop is None or stop_requested is None or not self._thread.is_alive():
            return
        self._stop_seconds, self._stop_reason = seconds, reason
        loop.call_soon_threadsafe(stop_requested.set)
        self._thread.join(timeout=seconds + 5.0)
        if self._thread.is_alive():
            raise CellError(f"the HTTP server did not stop within {seconds + 5.0:g} s")

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            if not self._serving.done():
                self._serving.set_exception(error)
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_requested = asyncio.Event()
        options = self._options
        client = EngineClient(
            options.engine_endpoint,
            f"http-{secrets.token_hex(8)}",
            keys=options.engine_keys,
            silence_seconds=options.silence_seconds,
            weight_update_seconds=options.weight_update_seconds,
            outage_seconds=options.outage_seconds,
        )
        admission = RequestAdmission(self._model)
        try:
            client.start()
            self._listeners = [
                await _listen(app, bound, options)
                for app, bound in zip(
                    self._applications(client, admission), self._sockets, strict=True
                )
            ]
            self._serving.set_result(None)
            await self._stop_requested.wait()
            client.fail(CellError(self._stop_reason))
            await asyncio.gather(*(self._close(listener) for listener in self._listeners))
        finally:
            await client.close()
            admission.close()
            if self._tracing is not None:
                self._tracing.close()

    async def _finish(self, seconds: float) -> bool:
        assert self._drain is not None
        self._drain.begin()
        for server in self._listeners[0].server.servers:
            server.close()
        return await self._drain.finished(seconds)

    def _applications(self, client: EngineClient, admission: RequestAdmission) -> list[ASGIApp]:
        options = self._options
        api_options = ApiOptions(
            bodies=BodyLimits(options.max_body_bytes, options.max_bodies_bytes),
            needs_key=options.api_keys is not None,
            version=options.version,
            created=options.created,
        )
        api = ServiceApi(self._model, client, admission, api_options)
        api_app = api.application()
        if options.api_keys is not None:
            api_app = RequireApiKey(api_app, options.api_keys, kind="API", open_paths=OPEN_PATHS)
        self._drain = Drain(api_app)
        admin = AdminApi(client).application()
        apps = open_to(self._drain, options.cors_origins), _guarded(admin, options.admin_keys)
        visited: list[ASGIApp] = [Visits(app, logs_access=options.logs_access) for app in apps]
        if options.tracer_provider is not None:
            self._tracing = Tracing(options.tracer_provider())
            visited[0] = self._tracing.around(visited[0])
        return visited

    async def _close(self, listener: "_Listener") -> None:
        server = listener.server
        server.config.timeout_graceful_shutdown = max(1, round(self._stop_seconds))
        server.should_exit = True
        await listener.ticks
        await server.shutdown(sockets=[listener.socket])


def _guarded(admin: ASGIApp, keys: ApiKeys | None) -> ASGIApp:
    if keys is None:
        return OnlyLocalNames(admin)
    return RequireApiKey(admin, keys, kind="admin", open_paths=frozenset())


@dataclass(frozen=True)
class _Listener:
    """A uvicorn server on a socket of ours. `ticks` is its own loop, which keeps the Date header right."""

    server: uvicorn.Server
    socket: socket.socket
    ticks: "asyncio.Task[None]"


async def _listen(app: ASGIApp, bound: socket.socket, options: HttpServerOptions) -> _Listener:
    """The parts of uvicorn.Server.serve without its signal handlers, so that it may run in any thread."""
    config = uvicorn.Config(
        app,
        http=protocol_with(options.limits),
        ssl_certfile=options.tls.cert if options.tls else None,
        ssl_keyfile=options.tls.key if options.tls else None,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        backlog=_BACKLOG,
        timeout_keep_alive=30,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[bound])
    return _Listener(server, bound, asyncio.create_task(server.main_loop()))


def _bind(host: str, port: int, *, shared: bool) -> socket.socket:
    """A listening socket. Its protocol is named because asyncio sets TCP_NODELAY only then: without it Nagle's
    algorithm and delayed acknowledgements add 40 ms to every answer."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # inherited
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    bound.setblocking(False)
    return bound
