"""msgpack of declared structs: encode, decode, arrays as packed columns. Validated on decode, never pickle.

An array crosses as [dtype, shape, bytes] (idea: vLLM's tagged msgspec structs). Each frame starts with the protocol
version, so that two builds refuse each other with one clear error instead of misreading.
"""

from typing import Any, Generic, TypeVar, get_origin

import msgspec
import numpy as np

from cluster.errors import WireError

PROTOCOL_VERSION = 1
_PREFIX = bytes([PROTOCOL_VERSION])
_DTYPES = frozenset({"|u1", "<u2", "<i4", "<i8", "<f4", "<f8", "|i1"})

M = TypeVar("M")


def _to_builtin(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        contiguous = np.ascontiguousarray(value)
        dtype = contiguous.dtype.str
        if dtype not in _DTYPES:
            raise WireError(f"arrays of dtype {dtype} do not cross; supported: {sorted(_DTYPES)}")
        return (dtype, value.shape, contiguous.data.cast("B") if contiguous.size else b"")
    raise WireError(f"{type(value).__name__} is not a wire type")


def _from_builtin(kind: type, value: Any) -> Any:
    if (get_origin(kind) or kind) is not np.ndarray:
        raise WireError(f"{kind!r} is not a wire type")
    dtype, shape, data = value
    if dtype not in _DTYPES:
        raise WireError(f"array dtype {dtype!r} refused; supported: {sorted(_DTYPES)}")
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_builtin)


def encode(message: msgspec.Struct) -> bytes:
    """One frame."""
    return _PREFIX + _ENCODER.encode(message)


class Decoder(Generic[M]):
    """Decodes frames of one declared union of structs. Arrays are read-only views of the frame.

    Raises WireError for another protocol version or anything that is not in the union.
    """

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union, dec_hook=_from_builtin)

    def decode(self, frame: bytes | memoryview) -> M:
        view = memoryview(frame)
        if len(view) == 0 or view[0] != PROTOCOL_VERSION:
            version = view[0] if len(view) else None
            raise WireError(
                f"protocol version {version}, expected {PROTOCOL_VERSION}: run one version of "
                "pointsman in all processes of a cell"
            )
        try:
            message: M = self._decoder.decode(view[1:])
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise WireError(f"not a message of this protocol: {error}") from error
        return message
