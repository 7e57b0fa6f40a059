"""The sockets that an engine binds, and who may come to them. Owner of all three and of their gatekeeper."""

from prometheus_client import Counter

from cluster.channel import PullSocket, RouterSocket
from cluster.channel_keys import EngineKeys
from cluster.config import Config
from cluster.gatekeeper import Gatekeeper
from cluster.routes import RouteShape

_SMALL_FRAME_BYTES = 2**24
_TOKEN_BYTES = 4
_SCORE_BYTES = 512
"""Of a token with all the alternatives that a client may ask for."""


class EngineSockets:
    """clients: of HTTP servers and the launcher; workers: of the ranks; routes: for their route and score frames."""

    def __init__(
        self, keys: EngineKeys, host: str, *, max_frame_bytes: int, refusals: Counter
    ) -> None:
        """refusals: by reason, of those who may not connect"""
        self._gatekeeper = Gatekeeper(lambda reason: refusals.labels(reason).inc())
        door = self._gatekeeper.door
        self.clients = RouterSocket(door("clients", keys.clients), max_frame_bytes)
        self.workers = RouterSocket(door("workers", keys.workers), max_frame_bytes)
        self.routes = PullSocket(door("routes", keys.workers), max_frame_bytes)
        self.client_endpoint = self.clients.bind(host)
        self.worker_endpoint = self.workers.bind(host)
        self.route_endpoint = self.routes.bind(host)

    def close_after_sending(self, seconds: float) -> None:
        """Returns when what was queued has left, or after so long."""
        for socket in (self.clients, self.workers, self.routes):
            socket.close_after_sending(seconds)
        self._gatekeeper.close()


def largest_frame(config: Config, route_shape: RouteShape) -> int:
    """Bytes that a peer of the cell may send at once: the prompts of one body, or what one rank recorded in a step."""
    prompts = _TOKEN_BYTES * config.http.max_body_bytes
    recorded = config.scheduler.max_num_batched_tokens * (
        route_shape.bytes_per_token + _SCORE_BYTES
    )
    return _SMALL_FRAME_BYTES + max(prompts, recorded)
