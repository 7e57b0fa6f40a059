"""Arrays as text: base64 of a .npy file, so that whoever reads it has dtype and shape from the file."""

import base64
import binascii
import io
from collections.abc import Iterator, Sequence

import numpy as np

PIECE_BYTES = 3 * 2**15
"""Of an array, at a time: some 50 µs of work. 3 bytes make 4 characters."""


class NpyText:
    """One array, given in parts, as text that is made piece by piece when it is needed: it may be tens of megabytes.

    No dataclass: msgspec would encode one by its fields.
    """

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        """parts: [n, …] each, at least one, of one dtype"""
        self._parts = parts

    def __len__(self) -> int:
        """Characters of the whole text, all ASCII."""
        num_bytes = len(self._head()) + sum(part.nbytes for part in self._parts)
        return 4 * -(-num_bytes // 3)

    def pieces(self) -> Iterator[bytes]:
        """None longer than 4/3 of PIECE_BYTES and a few characters."""
        left = self._head()
        for part in self._parts:
            flat = part.reshape(-1).view(np.uint8)
            for start in range(0, flat.size, PIECE_BYTES):
                left += flat[start : start + PIECE_BYTES].tobytes()
                whole = len(left) - len(left) % 3
                yield binascii.b2a_base64(left[:whole], newline=False)
                left = left[whole:]
        if left:
            yield binascii.b2a_base64(left, newline=False)

    def _head(self) -> bytes:
        """Of the file, with the shape of the whole array."""
        first = self._parts[0]
        shape = (sum(len(part) for part in self._parts), *first.shape[1:])
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            buffer,
            {
                "descr": np.lib.format.dtype_to_descr(first.dtype),
                "fortran_order": False,
                "shape": shape,
            },
        )
        return buffer.getvalue()


def encode_npy(array: np.ndarray) -> str:
    """The whole text at once."""
    return b"".join(NpyText([np.ascontiguousarray(array)]).pieces()).decode("ascii")


def decode_npy(text: str) -> np.ndarray:
    """Raises ValueError for text that is no base64, or not of a .npy file; never unpickles."""
    try:
        array: np.ndarray = np.load(
            io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False
        )
    except (binascii.Error, EOFError, UnicodeEncodeError) as error:
        raise ValueError(f"not base64 of a .npy file: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError("not base64 of a .npy file: an archive of several arrays")
    return array
