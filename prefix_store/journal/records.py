"""What a state file holds: a magic line, a header, then records. Each is framed by its length and a checksum.

    file     MAGIC, frame of a Header, frame of a record, …
    frame    length (4 bytes, little-endian), CRC-32 of length and payload, payload (msgpack of a declared struct)

Records say what was published and never that something is gone, so any of them may be missing: what is left of a
sequence is its beginning.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import numpy as np

from cluster.routes import RouteShape
from cluster.scores import SCORE_BYTES

MAGIC = b"pointsman state 1\n"
NAME_BYTES = 16
_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
RECORD_OVERHEAD_BYTES = 128
"""What frame, msgpack, stamp and the namespace of a first block take, at most."""
_MAX_HEADER_BYTES = 2**16
_RECORD_BYTES = 2**20
"""A run of more blocks than fit into so many is written as several records."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What must be the same for the records of a file to be of any use."""

    model_fingerprint: str
    numerics: str
    """What else decides which of two experts that are nearly equal is chosen, where that is promised to be the same."""
    block_size: int
    num_moe_layers: int
    num_experts_per_tok: int
    num_experts: int
    id_dtype: str
    """Of the expert ids as in memory, byte order included."""
    weight_dtype: str
    score_bytes: int
    """Per token."""

    @staticmethod
    def of(model_fingerprint: str, numerics: str, block_size: int, shape: RouteShape) -> "Header":
        return Header(
            model_fingerprint,
            numerics,
            block_size,
            shape.num_moe_layers,
            shape.num_experts_per_tok,
            shape.num_experts,
            np.dtype(shape.id_dtype).str,
            np.dtype(shape.weight_dtype).str,
            SCORE_BYTES,
        )

    def of_weights(self, model_fingerprint: str) -> "Header":
        """The same of a model with other weights."""
        return msgspec.structs.replace(self, model_fingerprint=model_fingerprint)


class RoutesRecord(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Routes of n consecutive blocks of a sequence, and what the blocks are."""

    stamp: int
    """The store's time of the last use."""
    namespace: str
    """Where the first block begins the sequence; else empty."""
    parent: bytes
    """Name of the block before the first one; empty where there is none."""
    names: bytes
    """[n · NAME_BYTES]"""
    tokens: bytes
    """[n · B] int32, as on the tree's edges"""
    topk_ids: bytes
    """[n · B, L, K]"""
    topk_weights: bytes
    """[n · B, L, K]"""

    @property
    def num_blocks(self) -> int:
        return len(self.names) // NAME_BYTES


class ScoresRecord(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Scores of n blocks, all that are known of each, with one alternative of each token: further ones are not kept. A
    later record of a block takes the place of an earlier one."""

    stamp: int
    names: bytes
    """[n · NAME_BYTES]"""
    rows: bytes
    """[n · B] of cluster.scores.SCORE"""

    @property
    def num_blocks(self) -> int:
        return len(self.names) // NAME_BYTES


Record = RoutesRecord | ScoresRecord


@dataclass(frozen=True)
class BlockSizes:
    """Bytes that one block takes in each column."""

    tokens: int
    topk_ids: int
    topk_weights: int
    scores: int

    @staticmethod
    def of(block_size: int, shape: RouteShape) -> "BlockSizes":
        choices = block_size * shape.num_moe_layers * shape.num_experts_per_tok
        return BlockSizes(
            tokens=4 * block_size,
            topk_ids=choices * shape.id_dtype.itemsize,
            topk_weights=choices * shape.weight_dtype.itemsize,
            scores=block_size * SCORE_BYTES,
        )

    @property
    def routes(self) -> int:
        return self.topk_ids + self.topk_weights

    @property
    def of_routes(self) -> int:
        """In a record of routes."""
        return NAME_BYTES + self.tokens + self.routes

    @property
    def of_scores(self) -> int:
        """In a record of scores."""
        return NAME_BYTES + self.scores

    @property
    def route_blocks_per_record(self) -> int:
        return max(1, _RECORD_BYTES // self.of_routes)

    @property
    def score_blocks_per_record(self) -> int:
        return max(1, _RECORD_BYTES // self.of_scores)

    @property
    def max_payload(self) -> int:
        """Of a record: longer ones are none."""
        one_block = max(self.of_routes, self.of_scores)
        return max(_RECORD_BYTES, one_block) + NAME_BYTES + RECORD_OVERHEAD_BYTES

    def stored_bytes(self, num_route_blocks: int, num_score_blocks: int) -> int:
        """What so many blocks take on disk at most: in records of one block."""
        routes = self.of_routes + NAME_BYTES + RECORD_OVERHEAD_BYTES
        scores = self.of_scores + RECORD_OVERHEAD_BYTES
        return num_route_blocks * routes + num_score_blocks * scores

    def fit(self, record: Record) -> bool:
        """Whether the columns of a record belong together."""
        if not record.names or len(record.names) % NAME_BYTES:
            return False
        n = record.num_blocks
        if isinstance(record, ScoresRecord):
            return len(record.rows) == n * self.scores
        columns = (len(record.tokens), len(record.topk_ids), len(record.topk_weights))
        rooted = bool(record.namespace) != bool(record.parent)
        named = len(record.parent) in (0, NAME_BYTES)
        sizes = (n * self.tokens, n * self.topk_ids, n * self.topk_weights)
        return rooted and named and columns == sizes


_ENCODER = msgspec.msgpack.Encoder()
_HEADER_DECODER = msgspec.msgpack.Decoder(Header)
_RECORD_DECODER = msgspec.msgpack.Decoder(Record)


def file_start(header: Header) -> bytes:
    """What a file begins with."""
    return MAGIC + frame(header)


def frame(message: Header | Record) -> bytes:
    payload = _ENCODER.encode(message)
    length = _LENGTH.pack(len(payload))
    return _FRAME.pack(len(payload), zlib.crc32(payload, zlib.crc32(length))) + payload


def read_header(stream: BinaryIO) -> Header | None:
    """From the beginning of a file; None if it is not one of this format, or damaged."""
    if stream.read(len(MAGIC)) != MAGIC:
        return None
    payload = _read_payload(stream, _MAX_HEADER_BYTES)
    try:
        return None if payload is None else _HEADER_DECODER.decode(payload)
    except msgspec.MsgspecError:
        return None


class RecordReader:
    """The records behind the header, up to the first that is not whole; `end` is then where that one begins."""

    def __init__(self, stream: BinaryIO, sizes: BlockSizes) -> None:
        self._stream = stream
        self._sizes = sizes
        self._max_payload = sizes.max_payload
        self.end = stream.tell()

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        """Each with the place where its frame begins."""
        while (payload := _read_payload(self._stream, self._max_payload)) is not None:
            record = _decode(payload)
            if record is None or not self._sizes.fit(record):
                return
            start, self.end = self.end, self.end + _FRAME.size + len(payload)
            yield start, record


def read_record(stream: BinaryIO, start: int, max_payload: int) -> Record:
    """One that has been read before, by its place. Raises OSError if it is not there any more."""
    stream.seek(start)
    payload = _read_payload(stream, max_payload)
    record = None if payload is None else _decode(payload)
    if record is None:
        raise OSError(f"the record at byte {start} has changed since it was read")
    return record


def _decode(payload: bytes) -> Record | None:
    try:
        record: Record = _RECORD_DECODER.decode(payload)
    except msgspec.MsgspecError:
        return None
    return record


def _read_payload(stream: BinaryIO, max_bytes: int) -> bytes | None:
    """None at the end of the file, and where the rest of it is no whole frame."""
    start = stream.read(_FRAME.size)
    if len(start) < _FRAME.size:
        return None
    length, checksum = _FRAME.unpack(start)
    payload = b"" if length > max_bytes else stream.read(length)
    if len(payload) < length:
        return None
    computed = zlib.crc32(payload, zlib.crc32(start[: _LENGTH.size]))
    return payload if computed == checksum else None
