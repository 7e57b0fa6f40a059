"""What a client is told when its request has ended. Pure: the request is read."""

from cluster.messages import Completion
from cluster.types import FinishReason
from router_service.request import Request


def completion_of(request: Request, reason: FinishReason, *, again: bool = False) -> Completion:
    """Routes if they were asked for; none of a request that failed. again: see Completion."""
    num_output = request.num_final_output_tokens
    if num_output is None:
        num_output = request.num_output_tokens
    routes = None
    if request.return_routes and reason not in ("error", "abort"):
        routes = request.route_log.slice(0, request.num_prompt_tokens + num_output - 1)
    return Completion(
        finish_reason=reason,
        error=request.error,
        num_output_tokens=num_output,
        cached_tokens=request.cached_tokens,
        replayed_tokens=request.replayed_tokens,
        topk_ids=None if routes is None else routes.topk_ids,
        topk_weights=None if routes is None else routes.topk_weights,
        again=again,
    )
