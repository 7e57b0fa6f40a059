"""Arrays as text: what numpy itself would have written, whatever the parts, and made in pieces."""

import base64
import io

import numpy as np
import pytest

from cluster.npy import PIECE_BYTES, NpyText, decode_npy, encode_npy


def numpys_text(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue())


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize("lengths", [[0], [1], [2, 0, 3], [5, 7, 11, 1], [PIECE_BYTES // 4, 4321]])
def test_parts_make_the_text_that_numpy_makes_of_the_whole(
    lengths: list[int], dtype: type[np.generic]
) -> None:
    whole = np.arange(sum(lengths) * 6).reshape(-1, 2, 3).astype(dtype)
    text = NpyText(np.split(whole, np.cumsum(lengths)[:-1]))
    pieces = list(text.pieces())
    assert b"".join(pieces) == numpys_text(whole)
    assert len(text) == len(b"".join(pieces))
    assert max(map(len, pieces)) < 4 * PIECE_BYTES // 3 + 200


def test_an_array_that_does_not_lie_in_order_is_written_as_it_reads() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6).T[::2]
    assert np.array_equal(decode_npy(encode_npy(array)), array)
