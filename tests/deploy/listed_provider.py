"""A cloud, as far as Ray's launcher asks one for its instances: they stand in the cluster file."""

from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import TAG_RAY_NODE_KIND


class ListedProvider(NodeProvider):  # type: ignore[misc]  # Ray's launcher is untyped
    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        if "refusal" in self.provider_config:
            raise PermissionError(self.provider_config["refusal"])
        listed: dict[str, Any] = self.provider_config["listed"]
        kind = tag_filters.get(TAG_RAY_NODE_KIND)
        return [name for k, names in listed.items() if kind in (None, k) for name in names]
