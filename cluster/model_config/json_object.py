"""A JSON object read with care: what is missing, of the wrong type or unknown is refused by file, key and value."""

import json
from pathlib import Path
from typing import Any

from cluster.errors import CheckpointError

MAX_SIZE = 2**31 - 1
"""Of any size in a config: ids and positions are int32."""


class JsonObject:
    """A parsed JSON object with typed access. Every refusal names the file, the key and the value.

    Owner of the set of keys that were read, so that what nobody read can be refused.
    """

    def __init__(self, file: Path, values: dict[str, Any]) -> None:
        self.file = file
        self.values = values
        self.keys_read: set[str] = set()

    @staticmethod
    def read(file: Path) -> "JsonObject":
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{file}: must hold a JSON object, got {type(values).__name__}")
        return JsonObject(file, values)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return self.values.get(key, default)

    def refuse(self, key: str, supported: str) -> CheckpointError:
        if key not in self.values:
            return CheckpointError(f"{self.file}: {key} is missing; supported: {supported}")
        found = json.dumps(self.values[key])
        shown = found if len(found) <= 200 else found[:200] + " …"
        return CheckpointError(f"{self.file}: {key} = {shown}; supported: {supported}")

    def integer(self, key: str, *, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self.get(key)
        if type(value) is not int or value < low:
            raise self.refuse(key, f"an integer ≥ {low}")
        if value > high:
            raise self.refuse(key, f"an integer ≤ {high}")
        return value

    def integer_or_null(self, key: str, *, low: int = 1) -> int | None:
        """The key must be there: its absence means different things to different readers."""
        if key in self.values and self.get(key) is None:
            return None
        return self.integer(key, low=low)

    def number(self, key: str, *, default: float) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.refuse(key, "a positive number")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """None for a missing key, null or 0."""
        return self.number(key, default=1.0) if self.get(key) else None

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.refuse(key, "true or false")
        return value

    def spelling(self, first: str, second: str) -> str:
        """The key that is present. Both may be, when they say the same."""
        present = [key for key in (first, second) if key in self.values]
        if len(present) == 2 and self.get(first) != self.get(second):
            raise self.refuse(first, f"the same value as {second} = {self.values[second]!r}")
        return present[0] if present else first
