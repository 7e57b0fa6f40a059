"""What a block is called in state files: a digest of its namespace and of all tokens up to its end.

A name only says to which block a record belongs; edges are made of the tokens themselves. 128 bits of BLAKE2b: to give
one's own block the name of another tenant's, whose namespace one does not have, takes a second preimage.
"""

import hashlib

from cluster.types import Namespace
from prefix_store.journal.records import NAME_BYTES


def block_names(
    namespace: Namespace, tokens: bytes, block_bytes: int, first_block: int, end_block: int
) -> list[bytes]:
    """Names of blocks [first_block, end_block) of a sequence. tokens: as in BlockKeys, from the sequence's start."""
    digest = hashlib.blake2b(namespace.encode() + b"\0", digest_size=NAME_BYTES)
    view = memoryview(tokens)
    digest.update(view[: first_block * block_bytes])
    names = []
    for start in range(first_block * block_bytes, end_block * block_bytes, block_bytes):
        digest.update(view[start : start + block_bytes])
        names.append(digest.digest())
    return names
