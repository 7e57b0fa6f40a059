"""What one family of models adds to the keys that all configs share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.model_config.json_object import JsonObject
from cluster.model_spec import AttentionSpec, GateSpec

MAX_LAYERS = 1024
MAX_EXPERTS = 2**16
"""Ids in routes are uint16 at most."""


@dataclass(frozen=True)
class Family:
    """architecture, model_type: its names in config.json

    switches:           keys of which one value can be computed; a missing key means that value
    inert_keys:         keys of its own that reach no forward pass
    moe_layers:         numbers of the layers with experts, of so many layers; at least one
    num_shared_experts: experts that every token visits
    """

    architecture: str
    model_type: str
    switches: dict[str, Any]
    inert_keys: frozenset[str]
    moe_layers: Callable[[JsonObject, int], tuple[int, ...]]
    num_shared_experts: Callable[[JsonObject], int]
    attention: Callable[[JsonObject], AttentionSpec]
    gate: Callable[[JsonObject], GateSpec]
