"""Routes to the clients that asked for them: as they are recorded, so many bytes per step.

A long prompt's routes are tens of megabytes for a large model. Gathered and sent in one piece when the request ends,
they would hold the loop up, and with it every other stream of the cell.
"""

from dataclasses import dataclass

from cluster.messages import RoutePart
from cluster.routes import RouteShape
from router_service.request import Request

MIN_PART_BYTES = 2**16
"""Of a request that goes on: a message for every token would cost more than it carries."""


@dataclass
class _Told:
    """position: next one to tell. num_parts counts them, because a client learns the shape from the first."""

    position: int
    num_parts: int = 0


class RouteOutlet:
    """Owner of how far each request's routes were told. First come, first served."""

    def __init__(self, shape: RouteShape, max_bytes: int) -> None:
        """max_bytes: told in one step, over all requests, if one token has not more."""
        self._shape = shape
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._told: dict[Request, _Told] = {}

    def add(self, request: Request) -> None:
        """One that asks for routes, or asks for none."""
        if request.return_routes:
            self._told[request] = _Told(request.routes_start)

    def forget(self, request: Request) -> None:
        self._told.pop(request, None)

    def begin_step(self) -> None:
        """The bytes of a step may be told again."""
        self._num_bytes = 0

    @property
    def is_exhausted(self) -> bool:
        """There is more to tell than this step may."""
        return self._num_bytes >= self._max_bytes

    def next_parts(self) -> list[tuple[Request, RoutePart]]:
        """What can be told now; it counts as told."""
        parts = []
        for request, told in self._told.items():
            if self.is_exhausted:
                break
            part = self._next_part(request, told)
            if part is not None:
                parts.append((request, part))
        return parts

    def is_complete(self, request: Request) -> bool:
        """Of one that has ended: its frames have arrived, and its client has what it asked for, as far as there is any
        (it may have ended before its prompt was computed), or gets an error instead."""
        if request.num_pending_frames:
            return False
        told = self._told.get(request)
        if told is None or request.error is not None:
            return True
        return told.num_parts > 0 and told.position >= self._known_end(request)

    def _next_part(self, request: Request, told: _Told) -> RoutePart | None:
        """An empty one only of a request that ends without any other."""
        start, end = told.position, self._known_end(request)
        room = max(1, (self._max_bytes - self._num_bytes) // self._bytes_per_token(request))
        end = max(start, min(end, start + room))
        num_bytes = (end - start) * self._bytes_per_token(request)
        if request.finish_reason is None and num_bytes < min(MIN_PART_BYTES, self._max_bytes):
            return None
        if start == end and told.num_parts:
            return None
        routes = request.route_log.slice(start, end)
        weights = routes.topk_weights if request.returns_route_weights else None
        told.position, told.num_parts = end, told.num_parts + 1
        self._num_bytes += num_bytes
        return RoutePart(start, routes.topk_ids, weights)

    def _known_end(self, request: Request) -> int:
        """Behind the last position that was an input, is asked for and has its routes."""
        num_output = request.num_final_output_tokens
        if num_output is None:
            num_output = request.num_output_tokens
        num_inputs = request.num_prompt_tokens + num_output - 1
        end = min(num_inputs, request.num_recorded_tokens)
        return end if request.routes_end is None else min(end, request.routes_end)

    def _bytes_per_token(self, request: Request) -> int:
        shape = self._shape
        if request.returns_route_weights:
            return shape.bytes_per_token
        per_choice = shape.id_dtype.itemsize
        return shape.num_moe_layers * shape.num_experts_per_tok * per_choice
