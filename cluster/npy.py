"""Arrays as text: base64 of a .npy file, so that whoever reads it has dtype and shape from the file."""

import base64
import binascii
import io

import numpy as np

PIECE_BYTES = 3 * 2**16
"""base64 keeps the interpreter for as long as it works on one piece; 3 bytes make 4 characters."""


def encode_npy(array: np.ndarray) -> str:
    """On a thread it lets others run every fraction of a millisecond, however large the array is."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    content = buffer.getbuffer()
    starts = range(0, len(content), PIECE_BYTES)
    pieces = [binascii.b2a_base64(content[i : i + PIECE_BYTES], newline=False) for i in starts]
    return b"".join(pieces).decode("ascii")


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
