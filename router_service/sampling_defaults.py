"""What an absent sampling field means for one model: its generation_config.json, else OpenAI's defaults."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import CheckpointError
from cluster.log import logger
from router_service.chat_template import read_json_object

_log = logger("http")
_NOT_APPLIED = {"top_k": (None, 0, 50), "min_p": (None, 0), "repetition_penalty": (None, 1)}
"""Fields of the file that we do not apply, with the values that change nothing (50 is Hugging Face's own default)."""


@dataclass(frozen=True)
class SamplingDefaults:
    temperature: float = 1.0
    top_p: float = 1.0


def load_sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """Raises CheckpointError naming the file and the value."""
    file = model_dir / "generation_config.json"
    if not file.exists():
        return SamplingDefaults()
    config = read_json_object(file)
    for name, silent in _NOT_APPLIED.items():
        if config.get(name) not in silent:
            _log.warning("%s: %s=%r is not applied", file.name, name, config[name])
    temperature = _number(config, "temperature", file, low=0.0, high=2.0)
    top_p = _number(config, "top_p", file, low=0.0, high=1.0)
    greedy = config.get("do_sample") is False
    return SamplingDefaults(temperature=0.0 if greedy else temperature, top_p=top_p or 1.0)


def _number(config: dict[str, Any], name: str, file: Path, *, low: float, high: float) -> float:
    value = config.get(name)
    if value is None:
        return 1.0
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise CheckpointError(f"{file}: {name} = {value!r} is not a number from {low} to {high}")
    return float(value)
