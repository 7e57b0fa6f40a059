"""JSON schemas at random."""

from typing import Any

import numpy as np


def random_schema(rng: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """Of values whose length has a bound."""
    kind = rng.integers(5 if depth else 3)
    if kind == 0:
        return {"type": "integer", "minimum": int(rng.integers(-99, 0)), "maximum": 99}
    if kind == 1:
        return {"enum": [["x", "é y", 3], [None, True], ["only"]][rng.integers(3)]}
    if kind == 2:
        return {"type": "string", "maxLength": int(rng.integers(1, 5))}
    if kind == 3:
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": 2}
    properties = {f"k{n}": random_schema(rng, depth - 1) for n in range(rng.integers(1, 4))}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[: rng.integers(0, 4)],
        "additionalProperties": False,
    }


def random_object_schema(rng: np.random.Generator) -> dict[str, Any]:
    """Of the arguments of a function."""
    while (schema := random_schema(rng)).get("type") != "object":
        pass
    return schema
