"""The sockets that an engine binds, and who may come to them. Owner of all three and of their gatekeeper."""

from dataclasses import dataclass, field

from prometheus_client import Counter

from cluster.channel import PullSocket, RouterSocket
from cluster.channel_keys import EngineKeys
from cluster.config import Config
from cluster.errors import CellError
from cluster.gatekeeper import Gatekeeper
from cluster.routes import RouteShape
from router_service.engine_life import EngineLife

_SMALL_FRAME_BYTES = 2**24
_TOKEN_BYTES = 4
_SCORE_BYTES = 512
"""Of a token with all the alternatives that a client may ask for."""


@dataclass(frozen=True)
class EngineAddress:
    """host: of this process; life: with the ports that its peers know, if they do"""

    host: str
    keys: EngineKeys
    life: EngineLife = field(default_factory=EngineLife)


class EngineSockets:
    """clients: of HTTP servers and the launcher; workers: of the ranks; routes: for their route and score frames."""

    def __init__(self, address: EngineAddress, *, max_frame_bytes: int, refusals: Counter) -> None:
        """refusals: by reason, of those who may not connect. Raises CellError where a port cannot be taken, and holds
        none of them then."""
        self._gatekeeper = Gatekeeper(lambda reason: refusals.labels(reason).inc())
        door, host, keys = self._gatekeeper.door, address.host, address.keys
        self.clients = RouterSocket(door("clients", keys.clients), max_frame_bytes)
        self.workers = RouterSocket(door("workers", keys.workers), max_frame_bytes)
        self.routes = PullSocket(door("routes", keys.workers), max_frame_bytes)
        clients, workers, routes = address.life.ports
        try:
            self.client_endpoint = self.clients.bind(host, clients)
            self.worker_endpoint = self.workers.bind(host, workers)
            self.route_endpoint = self.routes.bind(host, routes)
        except CellError:
            self.close_after_sending(0.0)
            raise

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
