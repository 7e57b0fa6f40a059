"""A model's vocabulary as llguidance needs it. Text is made of ordinary tokens alone: what spells a special or added
token is not it. Those come where a grammar names them, as `<[7]>` or by their own name in angle brackets.
"""

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer


class _PlainTokens:
    """What `TokenizerWrapper` asks for. Names are llguidance's."""

    bos_token_id = None

    def __init__(self, known: LLTokenizer, plain: Tokenizer) -> None:
        """known: knows what every token stands for; plain: writes text, and has no special tokens."""
        ids = range(known.vocab_size)
        self.eos_token_id = known.eos_token
        self.special_token_ids = [token_id for token_id in ids if known.is_special_token(token_id)]
        self.tokens = [_bytes_of(known, token_id) for token_id in ids]
        self._plain = plain

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids


def grammar_tokens(
    tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> LLTokenizer:
    """Raises ValueError: not a tokenizer, or one of a kind that is not supported."""
    eos = list(eos_token_ids)
    known = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos, slices=[])
    try:
        plain = Tokenizer.from_str(json.dumps(_without_added(json.loads(tokenizer_json))))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(str(error)) from error
    wrapped = TokenizerWrapper(_PlainTokens(known, plain))
    return LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=eos)


def _bytes_of(known: LLTokenizer, token_id: int) -> bytes:
    """Empty for padding, which llguidance shows by its id."""
    data = known.decode_bytes([token_id])
    return b"" if data == b"<[%d]>" % token_id else data


def _without_added(description: dict[str, Any]) -> dict[str, Any]:
    """Nor are they taken as a whole from the model's own entries, unless merges lead there."""
    added = {token["content"] for token in description.get("added_tokens") or ()}
    model = description.get("model") or {}
    merged = {part for merge in model.get("merges") or () for part in _parts_and_result(merge)}
    vocab = {
        entry: token_id
        for entry, token_id in (model.get("vocab") or {}).items()
        if entry not in added or entry in merged
    }
    return {**description, "added_tokens": [], "model": {**model, "vocab": vocab}}


def _parts_and_result(merge: str | list[str]) -> tuple[str, str, str]:
    """Both forms of tokenizer.json: "a b", and ["a", "b"] since tokenizers 0.20."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right
