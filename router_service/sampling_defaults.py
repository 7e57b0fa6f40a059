"""What an absent sampling field means for one model: its generation_config.json, else OpenAI's defaults."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import CheckpointError
from router_service.chat_template import present, read_json_object
from router_service.openai_errors import safe_text
from router_service.sampling_fields import (
    LARGEST_REPETITION_PENALTY,
    SMALLEST_REPETITION_PENALTY,
)

_FILE = "generation_config.json"
_NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_NOT_APPLIED: dict[str, tuple[object, ...]] = {
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ([], {}),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "stop_strings": ([],),
    "watermarking_config": (),
}
"""Settings of the file that would change which tokens come and are not applied, with the values that change nothing;
null always is one. Lengths (max_new_tokens, max_length) are the request's to say."""


@dataclass(frozen=True)
class SamplingDefaults:
    """top_k: at least 1, None: of all ids. not_applied: other settings of the model's makers, as name=value, that are
    not honoured."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    not_applied: tuple[str, ...] = ()

    @property
    def warning(self) -> str | None:
        """One line for whoever starts the server."""
        if not self.not_applied:
            return None
        return f"{_FILE}: not applied: {', '.join(self.not_applied)}"


def load_sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """Raises CheckpointError naming the file, the setting and the value."""
    file = model_dir / _FILE
    if not present(file):
        return SamplingDefaults()
    config = read_json_object(file)
    values = _NEUTRAL | {name: value for name, value in config.items() if value is not None}
    temperature = _number(values, "temperature", file, "from 0 to 2", lambda t: 0 <= t <= 2)
    top_p = _number(values, "top_p", file, "above 0, up to 1", lambda p: 0 < p <= 1)
    min_p = _number(values, "min_p", file, "from 0 to 1", lambda p: 0 <= p <= 1)
    low, high = SMALLEST_REPETITION_PENALTY, LARGEST_REPETITION_PENALTY
    repetition_penalty = _number(
        values, "repetition_penalty", file, f"from {low} to {high}", lambda p: low <= p <= high
    )
    do_sample = config.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise CheckpointError(f"{file}: do_sample = {safe_text(do_sample)} is not true or false")
    return SamplingDefaults(
        temperature=0.0 if do_sample is False else temperature,
        top_p=top_p,
        top_k=_top_k(values, file),
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        not_applied=tuple(
            f"{name}={safe_text(config[name])}"
            for name, neutral in _NOT_APPLIED.items()
            if config.get(name) is not None and config[name] not in neutral
        ),
    )


def _number(
    values: dict[str, Any], name: str, file: Path, supported: str, fits: Callable[[float], bool]
) -> float:
    value = values[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not fits(value):
        raise CheckpointError(f"{file}: {name} = {safe_text(value)} is not a number {supported}")
    return float(value)


def _top_k(values: dict[str, Any], file: Path) -> int | None:
    value = values["top_k"]
    if type(value) is not int or value < -1:
        raise CheckpointError(f"{file}: top_k = {safe_text(value)} is not an integer from -1")
    return value if value > 0 else None
