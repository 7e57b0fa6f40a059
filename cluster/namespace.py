"""Who may share prefixes with whom: content identity of a model, and the namespace made of it.

Everything is defined by content and computed by SHA-256 over a canonical, versioned encoding, so that every process on
every host gets the same keys and another checkpoint under the same name never shares a node.
"""

import hashlib
import json
from io import BufferedReader
from pathlib import Path

from cluster.errors import CheckpointError
from cluster.types import Namespace

ENCODING_VERSION = 2
WHOLE_HASH_LIMIT_BYTES = 2**30
_SAMPLE_BYTES = 4096
_VERSION_DIGITS = 16
_MAX_HEADER_BYTES = 2**28


def namespace_of(
    model_fingerprint: str, *, block_size: int, tenant: str | None, cache_salt: str | None
) -> Namespace:
    """The namespace of prefixes of one model, block size, tenant and salt: a salt parts only what one tenant sends.

    Requests without a salt share; requests with equal salts share, compared code point by code point. An empty salt is
    a salt like any other: it shares with other empty ones and not with requests that have none, so that a client whose
    secret came out empty does not land among the unsalted. (vLLM refuses it; an HTTP edge may too.)
    """
    return Namespace(
        _digest(
            {
                "kind": "namespace",
                "version": ENCODING_VERSION,
                "model": model_fingerprint,
                "block_size": block_size,
                "tenant": tenant,
                "cache_salt": cache_salt,
            }
        )
    )


def weight_version(model_fingerprint: str) -> str:
    """What answers call the weights that made them: the first 16 hexadecimal digits of the fingerprint, so that equal
    weights have one name on every server, after every restart and however often others were served between.
    """
    return model_fingerprint[:_VERSION_DIGITS]


def model_fingerprint(
    model_dir: Path, dtype: str, *, whole_hash_limit_bytes: int = WHOLE_HASH_LIMIT_BYTES
) -> str:
    """Content identity of a checkpoint served in `dtype`: config.json byte by byte, and every *.safetensors file.

    Up to `whole_hash_limit_bytes` of weights in all, every byte counts. Above, reading everything would cost minutes at
    each start: then name, size and header (names, dtypes, shapes) of each file count, and of every tensor three samples
    of 4 KiB (start, middle, end; all of a tensor up to 12 KiB). Training changes a tensor nearly everywhere; an edit
    that keeps away from the samples of every tensor would go unnoticed. Raises CheckpointError.
    """
    config = model_dir / "config.json"
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{model_dir} holds no *.safetensors file: point --model at a checkpoint"
        )
    try:
        whole = sum(file.stat().st_size for file in files) <= whole_hash_limit_bytes
        return _digest(
            {
                "kind": "model",
                "version": ENCODING_VERSION,
                "dtype": dtype,
                "config": hashlib.sha256(config.read_bytes()).hexdigest(),
                "weights": [_weights_entry(file, whole) for file in files],
            }
        )
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error


def _digest(content: dict[str, object]) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _weights_entry(file: Path, whole: bool) -> list[object]:
    with file.open("rb") as stream:
        digest = _digest_of_all(stream) if whole else _digest_of_samples(stream, file)
    return [file.name, file.stat().st_size, "whole" if whole else "samples", digest]


def _digest_of_all(stream: BufferedReader) -> str:
    """In pieces of 256 KiB: an engine that is given other weights again and again grew by what was read at once."""
    return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of_samples(stream: BufferedReader, file: Path) -> str:
    """Header, then samples of each tensor in file order. Layout: 8 bytes header length, JSON header, data."""
    content = hashlib.sha256()
    prefix = stream.read(8)
    header_bytes = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or header_bytes > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{file} is no safetensors file: a header of {header_bytes} bytes")
    header = stream.read(header_bytes)
    content.update(prefix + header)
    data_start = 8 + header_bytes
    for begin, end in _tensor_regions(header, file):
        for offset, length in _samples(begin, end):
            stream.seek(data_start + offset)
            content.update(stream.read(length))
    return content.hexdigest()


def _tensor_regions(header: bytes, file: Path) -> list[tuple[int, int]]:
    try:
        entries = json.loads(header)
        regions = [
            entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"
        ]
        return sorted((int(begin), int(end)) for begin, end in regions)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: the safetensors header cannot be read: {error}") from error


def _samples(begin: int, end: int) -> list[tuple[int, int]]:
    """(offset, length) of what is hashed of a tensor that lies in [begin, end)."""
    size = end - begin
    if size <= 3 * _SAMPLE_BYTES:
        return [(begin, size)]
    starts = (begin, begin + (size - _SAMPLE_BYTES) // 2, end - _SAMPLE_BYTES)
    return [(start, _SAMPLE_BYTES) for start in starts]
