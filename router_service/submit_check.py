"""What an HTTP server promises of a submit, checked again before it can reach a rank. Pure."""

import numpy as np

from cluster.errors import RequestError
from cluster.logit_rules import LogitRules
from cluster.messages import Submit
from router_service.engine_limits import EngineLimits


def check_submit(submit: Submit, limits: EngineLimits) -> None:
    """Raises RequestError: ids out of range, nothing to generate, or more than a rank can ever hold."""
    _check_prompt(submit, limits.vocab_size)
    num_prompt_tokens, max_tokens = len(submit.prompt_token_ids), submit.sampling.max_tokens
    if max_tokens < 0:
        raise RequestError(f"max_tokens is {max_tokens}: ask for 0 or more", field="max_tokens")
    if any(not 0 <= i < limits.vocab_size for i in submit.sampling.barred_token_ids):
        raise RequestError(
            f"min_tokens bars ids that are not from 0 to {limits.vocab_size - 1}",
            field="stop_token_ids",
        )
    _check_rules(submit.sampling.rules, limits.vocab_size)
    for field, asked in (
        ("logprobs", submit.num_top_logprobs),
        ("prompt_logprobs", submit.num_prompt_alternatives),
    ):
        if not 1 <= asked <= limits.vocab_size:
            raise RequestError(
                f"{asked} alternatives asked for: from 1 to {limits.vocab_size}", field=field
            )
    needed = -(-(num_prompt_tokens + max_tokens) // limits.block_size)
    if needed > limits.num_kv_blocks:
        raise RequestError(
            f"{num_prompt_tokens} prompt tokens with max_tokens {max_tokens} need {needed} KV blocks, "
            f"a rank has {limits.num_kv_blocks}: shorten the prompt or raise --kv-memory",
            field="prompt",
        )


def _check_rules(rules: LogitRules, vocab_size: int) -> None:
    for field, token_ids in (
        ("allowed_token_ids", rules.allowed_token_ids or ()),
        ("logit_bias", rules.biased_token_ids),
        ("bad_words", [token_id for word in rules.bad_words for token_id in word]),
    ):
        if any(not 0 <= token_id < vocab_size for token_id in token_ids):
            raise RequestError(
                f"{field} holds ids that are not from 0 to {vocab_size - 1}", field=field
            )


def _check_prompt(submit: Submit, vocab_size: int) -> None:
    prompt = submit.prompt_token_ids
    if prompt.dtype != np.int32 or prompt.ndim != 1 or not len(prompt):
        raise RequestError(
            f"prompt_token_ids of shape {list(prompt.shape)} and dtype {prompt.dtype}: "
            "send [n] int32 with at least one token",
            field="prompt",
        )
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocab_size:
        raise RequestError(
            f"prompt_token_ids hold {low if low < 0 else high}: ids are from 0 to {vocab_size - 1}",
            field="prompt",
        )
