"""What leaves the engine for HTTP servers and the launcher."""

from cluster.channel import RouterSocket
from cluster.errors import CellError, OverloadedError, RequestError
from cluster.log import logger
from cluster.messages import (
    OutputBatch,
    OutputDelta,
    Refused,
    Submit,
    ToHttpServer,
    ToLauncher,
)
from cluster.wire import encode
from router_service.engine import Engine

_LOG = logger("engine")


class EnginePost:
    """Sends on the clients' socket, which belongs to `EngineSockets`."""

    def __init__(self, socket: RouterSocket) -> None:
        self._socket = socket
        self.launcher: bytes | None = None
        """Its name, once it watches."""

    def send(self, peer: bytes, message: ToHttpServer | ToLauncher) -> bool:
        """False when the peer is gone."""
        try:
            self._socket.send(peer, encode(message))
        except CellError as error:
            _LOG.warning("http server gone peer=%r reason=%s", peer, error)
            return False
        return True

    def tell_launcher(self, message: ToLauncher) -> None:
        if self.launcher is not None:
            self.send(self.launcher, message)

    def ship(self, engine: Engine) -> None:
        """One message per HTTP server for all that happened since the last call."""
        by_client: dict[bytes, list[OutputDelta]] = {}
        for item in engine.take_deltas():
            by_client.setdefault(item.client, []).append(item.delta)
        gone = [c for c, deltas in by_client.items() if not self.send(c, OutputBatch(deltas))]
        # only when the others have theirs: an abort may find that a worker is lost
        for client in gone:
            engine.abort_all(client)

    def refuse(self, peer: bytes, submits: list[Submit], error: RequestError | str) -> None:
        """All of them. A text: no step can run, and why."""
        first = submits[0].request_id
        if isinstance(error, str):
            self.send(peer, Refused(first, "unavailable", error, None))
            return
        kind = "overloaded" if isinstance(error, OverloadedError) else "invalid"
        self.send(peer, Refused(first, kind, str(error), error.field))
