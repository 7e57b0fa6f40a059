"""The admin application: commands for an operator, on a port of its own (loopback by default)."""

from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from cluster.errors import CellError, RequestError
from router_service.app import features_body, new_application, status_body
from router_service.body_validation import validate
from router_service.engine_client import EngineClient
from router_service.json_body import parse_json_object
from router_service.openai_errors import json_response
from router_service.protocol import EvictBody, FeaturesBody, WeightsBody
from router_service.request_bodies import read_body

_MAX_BODY_BYTES = 65536


class AdminApi:
    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def application(self) -> ASGIApp:
        app = new_application()
        app.add_api_route("/admin/evict", self.evict, methods=["POST"])
        app.add_api_route("/admin/features", self.features, methods=["POST"])
        app.add_api_route("/admin/weights", self.weights, methods=["POST"])
        app.add_api_route("/admin/status", self.status, methods=["GET", "HEAD"])
        return app

    async def evict(self, request: Request) -> Response:
        """Answers when it is done."""
        body = validate(EvictBody, await _json(request))
        report = await self._client.evict(body.part)
        if report.failure:
            raise CellError(
                f"evicted from memory, but some of it may still be in the state directory: {report.failure}; "
                "a restart would bring it back: evict again when the disk works, or remove the files"
            )
        return json_response(
            {
                "part": report.part,
                "nodes": report.nodes,
                "bytes": report.bytes,
                "kept_leased": report.kept_leased,
            }
        )

    async def features(self, request: Request) -> Response:
        """Answers with all features when the switch is done; it works from the next step on."""
        body = validate(FeaturesBody, await _json(request))
        features = await self._client.features(
            route_replay=body.route_replay,
            planned_dispatch=body.planned_dispatch,
            prefix_store=body.prefix_store,
        )
        return json_response(features_body(features))

    async def weights(self, request: Request) -> Response:
        """Answers when all ranks serve them."""
        body = validate(WeightsBody, await _json(request))
        updated = await self._client.update_weights(body.model_dir, body.running)
        return json_response(
            {
                "weight_version": updated.weight_version,
                "fingerprint": updated.fingerprint,
                "seconds": updated.seconds,
                "aborted": updated.aborted,
                "restarted": updated.restarted,
                "evicted_nodes": updated.evicted_nodes,
                "evicted_bytes": updated.evicted_bytes,
            }
        )

    async def status(self) -> Response:
        return json_response(status_body(await self._client.status()))


async def _json(request: Request) -> dict[str, object]:
    """Only what declares itself JSON: a browser sends other types to any host without asking, from any page."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError("send the body with the header content-type: application/json")
    return parse_json_object(await read_body(request, _MAX_BODY_BYTES))
