"""How the tokens of a request are drawn and which of them end it: its fields over the model's defaults.

Fields and meanings are vLLM's. Ranges that need no model are checked in `protocol`.
"""

from dataclasses import dataclass

from cluster.errors import RequestError
from cluster.logit_rules import LogitRules
from cluster.messages import SamplingParams
from router_service.openai_errors import safe_text
from router_service.protocol import GenerationFields
from router_service.requested_rules import (
    Encode,
    check_that_some_id_remains,
    checked_ids,
    requested_rules,
)
from router_service.sampling_defaults import SamplingDefaults


@dataclass(frozen=True)
class SamplingRules:
    """What a model says about it."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults
    encode: Encode

    def logit_rules(self, body: GenerationFields) -> LogitRules:
        """The same for all prompts of a body. Raises RequestError."""
        return requested_rules(
            body, vocab_size=self.vocab_size, defaults=self.defaults, encode=self.encode
        )


def requested_sampling(
    body: GenerationFields, rules: SamplingRules, logit_rules: LogitRules, max_tokens: int
) -> SamplingParams:
    """max_tokens: as it was resolved for one prompt. Raises RequestError."""
    defaults = rules.defaults
    own_stop_ids = checked_ids(body.stop_token_ids or (), "stop_token_ids", rules.vocab_size)
    all_stop_ids = tuple(dict.fromkeys((*rules.eos_token_ids, *own_stop_ids)))
    min_tokens = _min_tokens(body, max_tokens)
    barred = _barred(all_stop_ids, rules.vocab_size) if min_tokens else ()
    check_that_some_id_remains(logit_rules, barred, rules.vocab_size)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        seed=body.seed,
        stop_token_ids=own_stop_ids if body.ignore_eos else all_stop_ids,
        top_k=_top_k(body, rules),
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        min_tokens=min_tokens,
        barred_token_ids=barred,
        rules=logit_rules,
    )


def _top_k(body: GenerationFields, rules: SamplingRules) -> int | None:
    """None where it would take nothing away."""
    if body.top_k is None:
        return rules.defaults.top_k
    return body.top_k if 0 < body.top_k < rules.vocab_size else None


def _min_tokens(body: GenerationFields, max_tokens: int) -> int:
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: {safe_text(min_tokens)} is over {body.max_tokens_field}, which is "
            f"{max_tokens}",
            field="min_tokens",
        )
    return min_tokens


def _barred(stop_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """For the first min_tokens tokens; end-of-sequence ids also with ignore_eos, as vLLM has it."""
    if len(stop_ids) >= vocab_size:
        raise RequestError(
            f"stop_token_ids: with end of sequence they are all {vocab_size} ids of the model, "
            "so that min_tokens would leave none to sample",
            field="stop_token_ids",
        )
    return stop_ids
