"""Rotary embedding out of a config. The Hub's `rope_scaling` and transformers 5's `rope_parameters` hold the same."""

from typing import Any

from cluster.model_config.json_object import JsonObject
from cluster.model_spec import RopeSpec, YarnSpec

DEFAULT_THETA = 10000.0
_KEYS = {
    "default": {"rope_type", "type", "rope_theta"},
    "yarn": {
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    },
}


def read_rope(config: JsonObject, *, dim: int, interleaved: bool) -> RopeSpec:
    """Raises CheckpointError for a type, or a key beside it, that is not computed here."""
    if config.get("rope_scaling") and config.get("rope_parameters"):
        config.spelling("rope_scaling", "rope_parameters")
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    values = config.get(key)
    if values is None:
        theta = config.number("rope_theta", default=DEFAULT_THETA)
        return RopeSpec(dim, theta, interleaved, yarn=None)
    rope_type = _rope_type(values)
    if rope_type is None:
        raise config.refuse(key, 'an object of rope_type "default" or "yarn" with its usual keys')
    parameters = JsonObject(config.file, values)
    yarn = _read_yarn(parameters) if rope_type == "yarn" else None
    return RopeSpec(dim, _read_theta(config, key, parameters), interleaved, yarn)


def _read_theta(config: JsonObject, key: str, parameters: JsonObject) -> float:
    if "rope_theta" not in parameters.values:
        return config.number("rope_theta", default=DEFAULT_THETA)
    theta = parameters.number("rope_theta", default=DEFAULT_THETA)
    if config.number("rope_theta", default=theta) != theta:
        raise config.refuse("rope_theta", f"the value of {key}: {theta}")
    return theta


def _rope_type(parameters: Any) -> str | None:
    """None when the type, or a key beside it, is not computed here."""
    if not isinstance(parameters, dict):
        return None
    named = [parameters[key] for key in ("rope_type", "type") if key in parameters] or ["default"]
    rope_type = named[0]
    if any(name != rope_type for name in named) or rope_type not in ("default", "yarn"):
        return None
    return rope_type if parameters.keys() <= _KEYS[rope_type] else None


def _read_yarn(parameters: JsonObject) -> YarnSpec:
    """Magnitudes that are missing, null or 0 leave it to the factor alone."""
    factor = parameters.number("factor", default=0.0)
    if factor < 1:
        raise parameters.refuse("factor", "a number ≥ 1")
    return YarnSpec(
        factor=factor,
        original_max_position_embeddings=parameters.integer("original_max_position_embeddings"),
        beta_fast=parameters.number("beta_fast", default=32.0),
        beta_slow=parameters.number("beta_slow", default=1.0),
        mscale=parameters.number_or_none("mscale"),
        mscale_all_dim=parameters.number_or_none("mscale_all_dim"),
    )
