"""Arrays as text: base64 of a .npy file, so that whoever reads it has dtype and shape from the file."""

import base64
import binascii
import io

import numpy as np


def encode_npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getbuffer()).decode("ascii")


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
