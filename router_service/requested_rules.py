"""What a body asks to be done to logits, over the model's defaults. Fields and meanings are vLLM's."""

from collections.abc import Callable, Collection

from cluster.errors import RequestError
from cluster.logit_rules import LogitRules
from router_service.json_body import field_path
from router_service.openai_errors import safe_text
from router_service.sampling_defaults import SamplingDefaults
from router_service.sampling_fields import SamplingFields

Encode = Callable[[str], list[int]]
"""Text to token ids, without special tokens."""


def requested_rules(
    body: SamplingFields, *, vocab_size: int, defaults: SamplingDefaults, encode: Encode
) -> LogitRules:
    """Raises RequestError: an id that the model lacks, or nothing left to sample."""
    biases = _biases(body, vocab_size)
    allowed = body.allowed_token_ids
    penalty = body.repetition_penalty
    return LogitRules(
        allowed_token_ids=None
        if allowed is None
        else checked_ids(allowed, "allowed_token_ids", vocab_size),
        bad_words=_bad_words(body.bad_words or (), encode),
        biased_token_ids=tuple(biases),
        biases=tuple(biases.values()),
        repetition_penalty=defaults.repetition_penalty if penalty is None else penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
    )


def checked_ids(token_ids: Collection[int], field: str, vocab_size: int) -> tuple[int, ...]:
    """Distinct. Raises RequestError naming the place of one that the model lacks."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise _no_token_id(token_id, f"{field}[{index}]", vocab_size)
    return tuple(dict.fromkeys(token_ids))


def check_that_some_id_remains(
    rules: LogitRules, barred_token_ids: Collection[int], vocab_size: int
) -> None:
    """Whatever is generated. Raises RequestError naming the field that leaves nothing to sample."""
    if rules.allowed_token_ids is None and not rules.bad_words:
        return
    possible = range(vocab_size) if rules.allowed_token_ids is None else rules.allowed_token_ids
    taken = {word[-1] for word in rules.bad_words}.union(barred_token_ids)
    if len(taken) >= len(possible) and taken.issuperset(possible):
        field = "bad_words" if rules.allowed_token_ids is None else "allowed_token_ids"
        raise RequestError(
            f"{field}: of {len(possible)} ids none might be left to sample, together with what bad_words "
            "and min_tokens take away",
            field=field,
        )


def _biases(body: SamplingFields, vocab_size: int) -> dict[int, float]:
    given = body.logit_bias or {}
    return {_bias_id(name, vocab_size): bias for name, bias in given.items()}


def _bias_id(name: str, vocab_size: int) -> int:
    """Keys of JSON are strings; an id has one way to be written, so that none comes twice."""
    is_plain = name.isascii() and name.isdecimal() and len(name) < 20
    token_id = int(name) if is_plain else vocab_size
    if str(token_id) != name or token_id >= vocab_size:
        raise _no_token_id(name, field_path(("logit_bias", name)), vocab_size)
    return token_id


def _bad_words(words: Collection[str], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """Each as it starts a text and, where that is as long and another token, as it follows a space (vLLM)."""
    found: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return tuple(dict.fromkeys(word for word in found if word))


def _no_token_id(value: object, field: str, vocab_size: int) -> RequestError:
    return RequestError(
        f"{field}: {safe_text(value)} is not a token id; "
        f"ids are integers from 0 to {vocab_size - 1}",
        field=field,
    )
