"""The API application: paths to handlers, nothing of how a request is checked or generated."""

from dataclasses import asdict, dataclass

import msgspec
from fastapi import FastAPI, Request
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from cluster.errors import CellError, PointsmanError
from cluster.messages import CellStatus, FeatureStates
from router_service.answering import Answering
from router_service.engine_client import EngineClient
from router_service.error_shapes import error_answer
from router_service.generation import Generator
from router_service.messages_api.api import MessagesApi
from router_service.openai_api import ApiParts, OpenAiApi
from router_service.openai_errors import (
    MethodError,
    NoSuchRouteError,
    json_response,
    safe_text,
)
from router_service.openapi.document import openapi_document
from router_service.request_admission import RequestAdmission, ServedModel, unknown_model
from router_service.request_bodies import BodyLimits, RequestBodies
from router_service.responses_api.api import ResponsesApi
from router_service.shared_call import SharedCall
from router_service.streaming import ClientLeft
from router_service.tokenization_api import TokenizationApi

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
    bodies: BodyLimits
    needs_key: bool
    """Shown by the OpenAPI document; whoever is around the application checks it."""
    version: str
    created: int
    """Unix seconds; shown by /v1/models."""


class ServiceApi:
    """The API port: its paths, and handlers of those that do not generate."""

    def __init__(
        self,
        model: ServedModel,
        client: EngineClient,
        admission: RequestAdmission,
        options: ApiOptions,
    ) -> None:
        self._model = model
        self._client = client
        self._options = options
        self._parts = ApiParts(
            model,
            RequestBodies(options.bodies),
            admission,
            Answering(Generator(client, model.text.codec)),
        )
        self._document = openapi_document(options.version, model.name, with_keys=options.needs_key)
        self._status = SharedCall(lambda: client.status(HEALTH_SECONDS))

    def application(self) -> ASGIApp:
        app = new_application()
        app.add_api_route("/v1/models", self.models, methods=["GET", "HEAD"])
        app.add_api_route("/v1/models/{model:any_text}", self.model, methods=["GET", "HEAD"])
        openai = OpenAiApi(self._parts)
        app.add_api_route("/v1/completions", openai.completions, methods=["POST"])
        app.add_api_route("/v1/chat/completions", openai.chat_completions, methods=["POST"])
        responses = ResponsesApi(self._parts)
        app.add_api_route("/v1/responses", responses.create, methods=["POST"])
        messages = MessagesApi(self._parts)
        app.add_api_route("/v1/messages", messages.create, methods=["POST"])
        app.add_api_route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"])
        tokenization = TokenizationApi(self._parts)
        app.add_api_route("/tokenize", tokenization.tokenize, methods=["POST"])
        app.add_api_route("/detokenize", tokenization.detokenize, methods=["POST"])
        app.add_api_route("/v1/embeddings", tokenization.embeddings, methods=["POST"])
        app.add_api_route("/health", self.health, methods=["GET", "HEAD"])
        app.add_api_route("/health/live", self.live, methods=["GET", "HEAD"])
        app.add_api_route("/metrics", self.metrics, methods=["GET", "HEAD"])
        app.add_api_route("/version", self.version, methods=["GET", "HEAD"])
        app.add_api_route("/openapi.json", self.document, methods=["GET", "HEAD"])
        return app

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [await self._model_card()]})

    async def model(self, model: str) -> Response:
        if model != self._model.name:
            raise unknown_model(model, self._model.name)
        return json_response(await self._model_card())

    async def health(self) -> Response:
        try:
            status = await self._status()
        except CellError as error:
            return _not_ready(str(error))
        return json_response({"status": "ready"}) if status.ready else _not_ready(status.reason)

    async def live(self) -> Response:
        return json_response({"status": "live"})

    async def metrics(self) -> Response:
        return Response(await self._client.metrics(), headers={"content-type": _METRICS_TYPE})

    async def version(self) -> Response:
        return json_response({"version": self._options.version})

    async def document(self) -> Response:
        return json_response(self._document)

    async def _model_card(self) -> dict[str, object]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._options.created,
            "owned_by": "pointsman",
            "max_model_len": self._model.max_model_len,
            "weight_version": await self._weight_version(),
        }

    async def _weight_version(self) -> str | None:
        """None while the engine cannot be asked: the model is what it is all the same."""
        try:
            return (await self._status()).weight_version
        except CellError:
            return None


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
        "weight_version": status.weight_version,
        "state": None if status.state is None else asdict(status.state),
        "last_recovery": msgspec.to_builtins(status.last_recovery),
        "ranks": [
            {"rank": rank, "host": place.host, "device": place.device}
            for rank, place in enumerate(status.places)
        ],
    }


def features_body(features: FeatureStates) -> dict[str, object]:
    return {
        "route_replay": features.route_replay,
        "planned_dispatch": features.planned_dispatch,
        "prefix_store": features.prefix_store,
    }


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_answer(error, request.url.path)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = safe_text(request.url.path)
    if error.status_code == 405:
        refused: PointsmanError = MethodError(f"{path} does not take {request.method}")
    else:
        refused = NoSuchRouteError(f"there is nothing at {path}")
    answer = error_answer(refused, request.url.path)
    answer.headers.update(error.headers or {})
    return answer


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
