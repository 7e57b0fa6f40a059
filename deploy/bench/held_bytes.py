"""How much memory an object and all that it reaches take, as Python counts it."""

import gc
import sys
from types import FunctionType, ModuleType


def held_bytes(root: object) -> int:
    """Bytes of every object that is reachable from this one; code does not count."""
    total, seen, stack = 0, {id(root)}, [root]
    while stack:
        item = stack.pop()
        total += sys.getsizeof(item)
        for other in gc.get_referents(item):
            if id(other) not in seen and not isinstance(other, (type, FunctionType, ModuleType)):
                seen.add(id(other))
                stack.append(other)
    return total
