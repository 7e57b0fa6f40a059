"""`logprobs` of an answer in the two shapes that the OpenAI API has. Pure functions over scored tokens.

Log-probs are of the raw distribution: no temperature, no truncation. Of the most likely tokens as many are listed as
were asked for, and the token itself after them when it is not one of those.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.scores import ScoreColumns
from router_service.tokenizer import TextCodec

Json = dict[str, Any]


@dataclass(frozen=True)
class ScoredToken:
    """text_offset: characters of the choice's text before it; alternatives: ids and log-probs, most likely first.

    The first token of a sequence has no log-prob and no alternatives.
    """

    token_id: int
    text_offset: int
    logprob: float | None
    alternatives: tuple[tuple[int, float], ...]


def scored_token(
    token_id: int, text_offset: int, score: ScoreColumns, num_asked: int
) -> ScoredToken:
    """score: of this token alone."""
    logprob = float(score.chosen_logprobs[0])
    listed = score.alternatives(0)[:num_asked]
    if all(listed_id != token_id for listed_id, _ in listed):
        listed.append((token_id, logprob))
    return ScoredToken(token_id, text_offset, logprob, tuple(listed))


def num_scores(tokens: Sequence[ScoredToken]) -> int:
    """Tokens and alternatives."""
    return sum(1 + len(token.alternatives) for token in tokens)


def completion_logprobs(tokens: Sequence[ScoredToken], codec: TextCodec) -> Json:
    """The lists of /v1/completions, all of one length."""
    return {
        "tokens": [codec.token_text(token.token_id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {codec.token_text(token_id): logprob for token_id, logprob in token.alternatives}
            or None
            for token in tokens
        ],
        "text_offset": [token.text_offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[ScoredToken], codec: TextCodec, *, with_top: bool) -> Json:
    """The object of /v1/chat/completions. with_top: alternatives were asked for."""
    return {
        "content": [
            {
                **_entry(token.token_id, token.logprob, codec),
                "top_logprobs": [_entry(*pair, codec) for pair in token.alternatives if with_top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def prompt_logprobs(
    token_ids: Sequence[int], scores: ScoreColumns, num_asked: int, codec: TextCodec
) -> list[Json | None]:
    """Of one prompt, vLLM's shape: null for the first token, then by token id the token itself and the `num_asked` most
    likely ones. scores: [prompt - 1] of the tokens from the second on."""
    places = zip(token_ids[1:], scores.split(), strict=True)
    return [None, *(_ranked(token_id, score, num_asked, codec) for token_id, score in places)]


def _ranked(token_id: int, score: ScoreColumns, num_asked: int, codec: TextCodec) -> Json:
    entries = {token_id: (float(score.chosen_logprobs[0]), int(score.chosen_ranks[0]))}
    for place, (listed_id, logprob) in enumerate(score.alternatives(0)[:num_asked], start=1):
        entries.setdefault(listed_id, (logprob, place))
    return {
        str(listed_id): {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": codec.token_text(listed_id),
        }
        for listed_id, (logprob, rank) in entries.items()
    }


def _entry(token_id: int, logprob: float | None, codec: TextCodec) -> Json:
    return {
        "token": codec.token_text(token_id),
        "logprob": logprob,
        "bytes": list(codec.token_bytes(token_id)),
    }
