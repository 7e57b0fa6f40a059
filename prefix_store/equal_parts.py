"""An array as one bytes object per block."""

from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt


def equal_parts(array: npt.NDArray[Any], num_parts: int) -> list[bytes]:
    """Copies of equal parts along the first axis; none of an array without rows."""
    if num_parts < 2:
        return [array.tobytes()] * num_parts
    parts = np.ascontiguousarray(array).reshape(-1).view(_raw(array.nbytes // num_parts))
    return cast(list[bytes], parts.tolist())


@cache
def _raw(num_bytes: int) -> np.dtype[np.void]:
    return np.dtype((np.void, num_bytes))
