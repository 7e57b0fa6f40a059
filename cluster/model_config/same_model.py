"""Whether another checkpoint is of the model that is served: only its weights may be others."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from cluster.errors import CheckpointError
from cluster.model_config.read import read_model_spec
from cluster.model_spec import ModelSpec


def require_same_model(model_dir: Path, served: ModelSpec) -> None:
    """Raises CheckpointError as `read_model_spec` does, or naming the first value that differs, and both."""
    for name, theirs, ours in _differences(read_model_spec(model_dir), served):
        raise CheckpointError(
            f"{model_dir / 'config.json'}: {name} is {theirs!r}, that of the served model is {ours!r}; "
            "weights can be exchanged for others of the same architecture, sizes and dtype only"
        )


def _differences(theirs: Any, ours: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if theirs == ours:
        return
    if type(theirs) is not type(ours) or not is_dataclass(ours):
        yield path, theirs, ours
        return
    for field in fields(ours):
        name = f"{path}.{field.name}" if path else field.name
        yield from _differences(getattr(theirs, field.name), getattr(ours, field.name), name)
