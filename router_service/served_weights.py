"""Which weights an engine serves: what they are called, and the namespaces of prefixes that they computed."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.namespace import weight_version
from cluster.prefix_match import Eviction
from cluster.types import Namespace

NamespaceOf = Callable[[str, str | None, str | None], Namespace]
"""Of a model's fingerprint and a request's tenant and cache_salt."""


@dataclass(frozen=True)
class ServedWeights:
    fingerprint: str
    namespace_of: NamespaceOf

    @property
    def version(self) -> str:
        return weight_version(self.fingerprint)

    def namespace(self, tenant: str | None, cache_salt: str | None) -> Namespace:
        return self.namespace_of(self.fingerprint, tenant, cache_salt)


@dataclass(frozen=True)
class WeightExchange:
    """What it cost: requests that their clients have to ask for again, or their HTTP servers, and what was stored."""

    num_aborted: int
    num_restarted: int
    eviction: Eviction
