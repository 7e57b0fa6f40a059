"""What a rank is told of a request before the first step that names it. Pure: nothing is changed."""

from cluster.worker_messages import KnownTokens, SequenceStart
from router_service.request import Request


def sequence_start(request: Request) -> SequenceStart:
    sampling = request.sampling
    return SequenceStart(
        request.seq_id,
        sampling.temperature,
        sampling.top_p,
        request.seed,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        barred_token_ids=sampling.barred_token_ids,
        barred_before=request.num_prompt_tokens + sampling.min_tokens,
        num_top_logprobs=request.num_top_logprobs,
        choice=request.choice,
        rules=sampling.rules,
        known=_known_tokens(request),
        namespace=request.namespace,
    )


def _known_tokens(request: Request) -> KnownTokens | None:
    """What the rules look at and no step will bring: a prompt found in the store, output before a preemption."""
    if not request.sampling.rules.reads_output:
        return None
    first = 0 if request.sampling.rules.reads_prompt else request.num_prompt_tokens
    return KnownTokens(request.num_prompt_tokens, first, request.token_ids[first:])
