"""The API application: paths to handlers, nothing of how a request is checked or generated."""

import asyncio
import hmac
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import FastAPI, Request
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import CellError, PointsmanError
from cluster.messages import CellStatus, FeatureStates
from router_service.beside_the_loop import beside_the_loop
from router_service.body_validation import validate
from router_service.choice_delta import ChoiceDelta
from router_service.engine_client import EngineClient, SharedCall
from router_service.generation import Generation, Generator
from router_service.json_body import parse_json_object
from router_service.openai_errors import (
    ApiKeyError,
    BodyTooLargeError,
    MethodError,
    NoSuchRouteError,
    error_response,
    json_response,
    safe_text,
)
from router_service.protocol import ChatBody, CompletionBody
from router_service.request_admission import RequestAdmission, ServedModel, unknown_model
from router_service.responses import (
    ChunkWriter,
    chat_response,
    completion_response,
    whole_choices,
)
from router_service.streaming import DONE, ClientLeft, EventStream, event, unless_client_leaves

LARGE_BODY_BYTES = 2**18
"""Above this, parsing may take tens of milliseconds."""
HEALTH_SECONDS = 2.0
"""The engine must answer a health probe's query within this."""
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AnyText(Convertor[str]):
    """The rest of a path; starlette's own `path` ends at a line break."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("any_text", AnyText())


@dataclass(frozen=True)
class ApiOptions:
    max_body_bytes: int
    api_key: str | None
    version: str
    created: int
    """Unix seconds; shown by /v1/models."""


class OpenAiApi:
    """Handlers of the API port. Holds no request; the engine client owns what is open."""

    def __init__(
        self,
        model: ServedModel,
        client: EngineClient,
        admission: RequestAdmission,
        options: ApiOptions,
    ) -> None:
        self._model = model
        self._client = client
        self._admission = admission
        self._generator = Generator(client, model.text.codec)
        self._options = options
        self._large_body = asyncio.Lock()
        self._health_status = SharedCall(lambda: client.status(HEALTH_SECONDS))

    def application(self) -> ASGIApp:
        app = new_application()
        app.add_api_route("/v1/models", self.models, methods=["GET", "HEAD"])
        app.add_api_route("/v1/models/{model:any_text}", self.model, methods=["GET", "HEAD"])
        app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self.chat_completions, methods=["POST"])
        app.add_api_route("/health", self.health, methods=["GET", "HEAD"])
        app.add_api_route("/health/live", self.live, methods=["GET", "HEAD"])
        app.add_api_route("/metrics", self.metrics, methods=["GET", "HEAD"])
        app.add_api_route("/version", self.version, methods=["GET", "HEAD"])
        key = self._options.api_key
        return app if key is None else RequireApiKey(app, key)

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, model: str) -> Response:
        if model != self._model.name:
            raise unknown_model(model, self._model.name)
        return json_response(self._model_card())

    async def completions(self, request: Request) -> Response:
        body = validate(CompletionBody, await self._json(request))
        admitted = await self._admission.completion(body)
        return await self._answer(request, Generation(admitted, self._model.name, "cmpl"))

    async def chat_completions(self, request: Request) -> Response:
        body = validate(ChatBody, await self._json(request))
        admitted = await self._admission.chat(body)
        return await self._answer(request, Generation(admitted, self._model.name, "chatcmpl"))

    async def health(self) -> Response:
        try:
            status = await self._health_status()
        except CellError as error:
            return _not_ready(str(error))
        return json_response({"status": "ready"}) if status.ready else _not_ready(status.reason)

    async def live(self) -> Response:
        return json_response({"status": "live"})

    async def metrics(self) -> Response:
        return Response(await self._client.metrics(), headers={"content-type": _METRICS_TYPE})

    async def version(self) -> Response:
        return json_response({"version": self._options.version})

    async def _json(self, request: Request) -> dict[str, object]:
        """Large bodies one after the other on a thread: of what it does, only json.loads keeps others waiting."""
        body = await read_body(request, self._options.max_body_bytes)
        if len(body) <= LARGE_BODY_BYTES:
            return parse_json_object(body)
        async with self._large_body:
            return await asyncio.to_thread(parse_json_object, body)

    async def _answer(self, request: Request, generation: Generation) -> Response:
        if generation.request.stream:
            return EventStream(lambda: self._events(generation))
        deltas = await unless_client_leaves(request.receive, self._collect(generation))
        choices, codec = whole_choices(deltas), self._model.text.codec
        respond = chat_response if generation.prefix == "chatcmpl" else completion_response
        return await beside_the_loop(
            sum(len(choice.scored) for choice in choices),
            lambda: json_response(respond(generation, choices, codec)),
        )

    async def _collect(self, generation: Generation) -> list[ChoiceDelta]:
        async with aclosing(self._generator.run(generation)) as deltas:
            return [delta async for delta in deltas]

    async def _events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        writer = ChunkWriter(
            generation, self._model.text.codec, chat=generation.prefix == "chatcmpl"
        )
        opened = False
        async with aclosing(self._generator.run(generation)) as deltas:
            async for delta in deltas:
                chunks = (
                    writer.chunks(delta) if opened else [*writer.opening(), *writer.chunks(delta)]
                )
                opened = True
                yield b"".join(event(chunk) for chunk in chunks)
        usage_chunk = writer.usage_chunk()
        yield (b"" if usage_chunk is None else event(usage_chunk)) + DONE

    def _model_card(self) -> dict[str, object]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._options.created,
            "owned_by": "pointsman",
            "max_model_len": self._model.max_model_len,
        }


class RequireApiKey:
    """ASGI middleware: everything under /v1/ needs the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = b"Bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = ApiKeyError("wrong or missing API key; send Authorization: Bearer KEY")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def new_application() -> FastAPI:
    """An application that has no documentation pages and answers every failure with a JSON error."""
    app = FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=Response,
    )
    app.add_exception_handler(PointsmanError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(ClientLeft, _answer_nobody)
    app.add_exception_handler(Exception, _answer_error)
    return app


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLargeError before more than `max_bytes` are held, ClientLeft."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is over the limit of {max_bytes} bytes (max_body_bytes)")


def _not_ready(reason: str) -> Response:
    body = {"status": "unavailable", "reason": reason}
    return json_response(body, status=503, headers={"Retry-After": "1"})


def status_body(status: CellStatus) -> dict[str, object]:
    """What /admin/status shows."""
    return {
        "ready": status.ready,
        "reason": status.reason,
        "ep_size": status.ep_size,
        "placement_epoch": status.placement_epoch,
        "dispatch": status.dispatch,
        "num_waiting": status.num_waiting,
        "num_running": status.num_running,
        "kv_blocks_free": status.kv_blocks_free,
        "kv_blocks_used": status.kv_blocks_used,
        "kv_blocks_leased": status.kv_blocks_leased,
        "store_nodes": status.store_nodes,
        "store_bytes": status.store_bytes,
        "steps_total": status.steps_total,
        "features": features_body(status.features),
    }


def features_body(features: FeatureStates) -> dict[str, object]:
    return {
        "route_replay": features.route_replay,
        "planned_dispatch": features.planned_dispatch,
        "prefix_store": features.prefix_store,
    }


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = safe_text(request.url.path)
    if error.status_code == 405:
        refused: PointsmanError = MethodError(f"{path} does not take {request.method}")
    else:
        refused = NoSuchRouteError(f"there is nothing at {path}")
    answer = error_response(refused)
    answer.headers.update(error.headers or {})
    return answer


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
