"""What an HTTP server promises of a submit, checked again before it can reach a rank. Pure."""

from collections.abc import Callable, Sequence

import numpy as np

from cluster.errors import OverloadedError, RequestError
from cluster.logit_rules import LogitRules
from cluster.messages import Int32Column, Submit
from router_service.engine_limits import EngineLimits


def check_submits(
    submits: Sequence[Submit], limits: EngineLimits, is_in_use: Callable[[str], bool]
) -> None:
    """What a client asks for at once. is_in_use: of its request ids. Raises RequestError as `_check_submit`."""
    ids: set[str] = set()
    for submit in submits:
        _check_submit(submit, limits)
        if is_in_use(submit.request_id) or submit.request_id in ids:
            raise RequestError(
                f"request_id {submit.request_id!r} is in use: give every request an id of its own",
                field="request_id",
            )
        ids.add(submit.request_id)


def _check_submit(submit: Submit, limits: EngineLimits) -> None:
    """Raises RequestError: ids out of range, more output than was asked for, or more than a rank can ever hold."""
    _check_tokens(submit.prompt_token_ids, "prompt_token_ids", "prompt", limits.vocab_size)
    if not len(submit.prompt_token_ids):
        raise RequestError(
            "prompt_token_ids is empty: send [n] int32 with at least one token", field="prompt"
        )
    _check_output(submit, limits.vocab_size)
    _check_sources(submit)
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


def check_room(num_waiting: int, num_submits: int, bound: int) -> None:
    """Raises OverloadedError."""
    if num_waiting + num_submits > bound:
        raise OverloadedError(
            f"{num_waiting} requests are waiting and {num_submits} would come; the bound is {bound} "
            "(scheduler.max_num_waiting); try again later"
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


def _check_output(submit: Submit, vocab_size: int) -> None:
    output, max_tokens = submit.output_token_ids, submit.sampling.max_tokens
    if output is None:
        return
    _check_tokens(output, "output_token_ids", "output_token_ids", vocab_size)
    if len(output) > max(0, max_tokens):
        raise RequestError(
            f"{len(output)} output_token_ids with max_tokens {max_tokens}: send at most so many",
            field="output_token_ids",
        )


def _check_sources(submit: Submit) -> None:
    sources, num_prompt_tokens = submit.prompt_sources, len(submit.prompt_token_ids)
    if sources is None:
        return
    cached, replayed = sources.cached_tokens, sources.replayed_tokens
    if min(cached, replayed) < 0 or cached + replayed > num_prompt_tokens:
        raise RequestError(
            f"prompt_sources of {cached} cached and {replayed} replayed tokens: the prompt has "
            f"{num_prompt_tokens}",
            field="prompt_sources",
        )


def _check_tokens(token_ids: Int32Column, name: str, field: str, vocab_size: int) -> None:
    if token_ids.dtype != np.int32 or token_ids.ndim != 1:
        raise RequestError(
            f"{name} of shape {list(token_ids.shape)} and dtype {token_ids.dtype}: send [n] int32",
            field=field,
        )
    if not len(token_ids):
        return
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        raise RequestError(
            f"{name} hold {low if low < 0 else high}: ids are from 0 to {vocab_size - 1}",
            field=field,
        )
