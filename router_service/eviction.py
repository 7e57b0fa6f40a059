"""An eviction by command, answered when it is true of the disk as well."""

from collections.abc import Callable

from cluster.messages import EvictCommand, EvictReport
from router_service.clients import PrefixStore
from router_service.engine import Engine


def evict(
    command: EvictCommand,
    engine: Engine,
    store: PrefixStore,
    send: Callable[[EvictReport], object],
) -> None:
    """The loop goes on meanwhile; the answer may come out of a later upkeep of the store, or of its end."""
    done = engine.evict(command.part)

    def report(failure: str) -> None:
        sizes = done.nodes, done.num_bytes, done.kept_leased
        send(EvictReport(command.query_id, command.part, *sizes, failure))

    store.when_settled(report)
