"""What a client is told when its request has ended. Pure: the request is read."""

from cluster.messages import Completion, PromptSources
from cluster.types import FinishReason
from router_service.request import Request

NOT_FINITE = (
    "the model produced a value that is not finite for this request (router logits or "
    "logits hold NaN or infinity); nothing of it was stored"
)


def completion_of(request: Request, reason: FinishReason, *, again: bool = False) -> Completion:
    """again: see Completion."""
    num_output = request.num_final_output_tokens
    if num_output is None:
        num_output = request.num_output_tokens
    sources = request.prompt_sources or PromptSources(0, 0)
    return Completion(
        finish_reason=reason,
        error=request.error,
        num_output_tokens=num_output,
        cached_tokens=sources.cached_tokens,
        replayed_tokens=sources.replayed_tokens,
        again=again,
        is_at_fault=request.is_at_fault,
    )
