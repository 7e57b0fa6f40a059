"""Whether another checkpoint is of the model that is served: only its weights may be others."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from cluster.errors import CheckpointError
from cluster.model_config.read import read_model_spec
from cluster.model_spec import ModelSpec


def require_same_model(model_dir: Path, served: ModelSpec) -> None:
    """Raises CheckpointError as `read_model_spec` does, or naming the file and the first value in it that differs, and
    both values.

    End-of-sequence ids that the directory does not name are those that are served: many trainers write no
    generation_config.json. What config.json says of them alone may be what the served one says, or what is served.
    """
    theirs = read_model_spec(model_dir)
    config_file = model_dir / "config.json"
    for name, value, ours in _differences(_without_eos(theirs), _without_eos(served)):
        raise _differs(config_file, name, value, ours)
    end = theirs.eos_token_ids
    if theirs.generation_eos_token_ids is not None:
        if end != served.eos_token_ids:
            file = model_dir / "generation_config.json"
            raise _differs(file, "eos_token_id", end, served.eos_token_ids)
    elif end and end not in (served.config_eos_token_ids, served.eos_token_ids):
        raise _differs(config_file, "eos_token_id", end, served.eos_token_ids)


def _without_eos(spec: ModelSpec) -> ModelSpec:
    return replace(spec, config_eos_token_ids=(), generation_eos_token_ids=None)


def _differs(file: Path, name: str, theirs: Any, ours: Any) -> CheckpointError:
    return CheckpointError(
        f"{file}: {name} is {theirs!r}, that of the served model is {ours!r}; "
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
