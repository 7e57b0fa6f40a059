"""What the engine has to say to HTTP servers, in order, until somebody ships it."""

from dataclasses import dataclass

from cluster.messages import Completion, OutputDelta, RoutePart
from cluster.scores import ScoreColumns
from router_service.request import Request


@dataclass(frozen=True)
class ClientDelta:
    """One delta and the HTTP server that it goes to."""

    client: bytes
    delta: OutputDelta


class Outbox:
    def __init__(self, weight_version: str) -> None:
        self.weight_version = weight_version
        """Of the weights that compute what is told from now on."""
        self._deltas: list[ClientDelta] = []

    def tell(
        self,
        request: Request,
        *,
        token_ids: list[int] | None = None,
        completion: Completion | None = None,
        scores: ScoreColumns | None = None,
        prompt_scores: ScoreColumns | None = None,
        routes: RoutePart | None = None,
    ) -> None:
        request.answer.was_told |= routes is None  # those are shown with the end
        is_first = bool(token_ids) and request.num_output_tokens == 1
        delta = OutputDelta(
            request.request_id,
            token_ids or [],
            completion,
            scores,
            prompt_scores,
            self.weight_version,
            routes,
            request.prompt_sources if is_first else None,
        )
        self._deltas.append(ClientDelta(request.client, delta))

    def take(self) -> list[ClientDelta]:
        """Since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas
