"""Text to token ids and the table back. No event loop, no limits of a request: see `request_admission.py`.

Only `tokenizers` and jinja2 are used, so that an HTTP server starts in a fraction of a second.
"""

import json
from collections import ChainMap
from collections.abc import Collection, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from cluster.errors import CheckpointError
from router_service.detokenizer import Detokenizer, token_bytes


class TextCodec:
    """A checkpoint's byte-level BPE tokenizer. Immutable; encoding releases the GIL and may run in any thread."""

    def __init__(self, model_dir: Path) -> None:
        """Raises CheckpointError: no tokenizer.json, or one that is not byte-level BPE."""
        file = model_dir / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise CheckpointError(
                f"{file}: no tokenizer can be read: {error}; take the one of this model"
            ) from error
        description = json.loads(self._tokenizer.to_str())
        decoder = (description.get("decoder") or {}).get("type")
        if decoder != "ByteLevel":
            raise CheckpointError(
                f"{file}: decoder {decoder!r} is not served; supported: ByteLevel"
            )
        self._bytes_of_token = _byte_table(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self.special_texts = frozenset(self._special.values())
        self.added_token_ids = {token.content: i for i, token in added.items()}
        """Of tokens that are never cut, special or not, by their text."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise CheckpointError(f"{file}: holds no token")
        self.max_token_id: int = max(vocabulary.values())
        self.max_characters_per_token = _max_characters_per_token(self._tokenizer, description)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. Special tokens written in the text are recognised. `text` must be encodable as UTF-8.

        `encode` of tokenizers 0.23 keeps the GIL, `encode_batch_fast` releases it (and leaves out offsets).
        """
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all of them together, special tokens as they are written."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def vocabulary_entry(self, token_id: int) -> str:
        """The token as tokenizer.json has it: bytes as characters, "Ġ" for a space; empty for padding."""
        entry: str | None = self._tokenizer.id_to_token(token_id)
        return entry or ""

    def starts(self, text: str) -> list[int]:
        """Where in `text` each token of `encode(text, add_special_tokens=True)` begins, in characters."""
        return [start for start, _ in self._tokenizer.encode(text).offsets]

    def detokenizer(self, markers: Collection[str] = (), begun: bytes = b"") -> Detokenizer:
        """markers: special tokens that leave their text all the same; begun: see Detokenizer."""
        shown = {i: text.encode() for i, text in self._special.items() if text in markers}
        table = self._bytes_of_token
        # shown is not written to
        return Detokenizer(ChainMap(shown, table) if shown else table, begun)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, special ones as they are written; empty for an id that is only padding."""
        if token_id in self._special:
            return self._special[token_id].encode()
        return self._bytes_of_token.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        """The same as text, different for every token: one that is no whole text is written as OpenAI does, as
        "bytes:\\xe2\\x80", and padding as "token_id:50000"."""
        data = self.token_bytes(token_id)
        if not data:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _byte_table(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Bytes by id; special tokens are left out, so that they leave no text."""
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {
        token_id: token_bytes(entry)
        for entry, token_id in vocabulary.items()
        if token_id not in special
    }


def _max_characters_per_token(tokenizer: Tokenizer, description: dict[str, object]) -> int | None:
    """The most characters of a text that one token can stand for; None where that has no bound.

    A byte-level entry has one character per byte and a character has at least one byte. A normalizer can shorten the
    text and an added token can swallow the spaces around it.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    if description.get("normalizer") is not None or any(t.lstrip or t.rstrip for t in added):
        return None
    return max(len(entry) for entry in tokenizer.get_vocab(with_added_tokens=True))
