"""Switches that an operator may turn while serving. The output is the same either way; time and memory are not."""

from dataclasses import dataclass

from cluster.messages import FeatureStates


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

    def switch(
        self,
        *,
        route_replay: bool | None = None,
        planned_dispatch: bool | None = None,
        prefix_store: bool | None = None,
    ) -> None:
        """None leaves a feature as it is."""
        if route_replay is not None:
            self.route_replay = route_replay
        if planned_dispatch is not None:
            self.planned_dispatch = planned_dispatch
        if prefix_store is not None:
            self.prefix_store = prefix_store

    @property
    def states(self) -> FeatureStates:
        return FeatureStates(self.route_replay, self.planned_dispatch, self.prefix_store)
