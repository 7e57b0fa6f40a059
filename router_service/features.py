"""Switches that an operator may turn while serving. The output is the same either way; time and memory are not."""

from dataclasses import dataclass


@dataclass
class Features:
    """Owner: the engine. Read at every schedule.

    route_replay:     routes from the store are used; a request always replays its own
    planned_dispatch: replayed tokens travel by precompiled plans
    prefix_store:     prompts are matched and blocks published
    """

    route_replay: bool = True
    planned_dispatch: bool = True
    prefix_store: bool = True
