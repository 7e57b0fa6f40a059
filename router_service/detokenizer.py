"""Token ids to text, one token at a time, for byte-level BPE. Never half a character; special tokens leave no text.

A byte-level vocabulary entry is bytes written as printable characters (idea: GPT-2). So a token is a byte string, and
an incremental UTF-8 decoder does the rest: no re-decoding of earlier tokens and the same replacement characters for
invalid bytes as a decode of the whole id list.
"""

import codecs
from collections.abc import Mapping


def _byte_of_character() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


def token_bytes(entry: str) -> bytes:
    """Bytes of one vocabulary entry; an entry outside the alphabet stands for its own UTF-8, as in `tokenizers`."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in entry])
    except KeyError:
        return entry.encode()


class Detokenizer:
    """Text of one growing id list. Owner of the bytes of a character that is not complete yet."""

    def __init__(self, bytes_of_token: Mapping[int, bytes], begun: bytes = b"") -> None:
        """bytes_of_token: bytes by id. Ids without an entry (special, or padding of the vocabulary) are silent.
        begun: `held` of a detokenizer that this one goes on from."""
        self._bytes_of_token = bytes_of_token
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(begun)

    @property
    def held(self) -> bytes:
        """The beginning of a character that is not complete."""
        return self._decoder.getstate()[0]

    def num_broken_by(self, token_id: int) -> int:
        """Characters (one, if any) that replace what is held when this token comes and does not go on with it. They
        come before the token's own."""
        held, new = self.held, self._bytes_of_token.get(token_id, b"")
        if not (held and new):
            return 0
        try:
            codecs.getincrementaldecoder("utf-8")(errors="strict").decode(held + new[:1])
        except UnicodeDecodeError:
            return 1
        return 0

    def add(self, token_id: int) -> str:
        """Characters that this token completes, possibly none."""
        return self._decoder.decode(self._bytes_of_token.get(token_id, b""))

    def finish(self) -> str:
        """What an incomplete tail decodes to, once, at the end of the generation."""
        return self._decoder.decode(b"", final=True)
