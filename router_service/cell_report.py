"""What a cell says of itself when somebody looks: its status, and the metrics that mirror engine and store."""

from cluster.messages import CellStatus, LastRecovery
from cluster.metrics import Metrics
from cluster.prefix_match import StoreStats
from cluster.rank_place import RankPlace
from cluster.worker_messages import CellIdentity
from router_service.engine import Engine
from router_service.recovery import Recovered


def status_of(
    query_id: int,
    not_ready: str,
    identity: CellIdentity,
    places: list[RankPlace],
    engine: Engine,
    stats: StoreStats,
    *,
    last_recovery: LastRecovery | None,
) -> CellStatus:
    """not_ready: why no step can run, empty when one can. places: by rank."""
    return CellStatus(
        query_id=query_id,
        ready=not not_ready,
        reason=not_ready,
        ep_size=identity.ep_size,
        placement_epoch=identity.placement_epoch,
        dispatch=identity.dispatch,
        num_waiting=engine.num_waiting,
        num_running=engine.num_running,
        kv_blocks_free=list(stats.kv_blocks_free),
        kv_blocks_used=list(stats.kv_blocks_used),
        kv_blocks_leased=stats.kv_blocks_leased,
        store_nodes=stats.num_nodes,
        store_bytes={
            "kv": stats.kv_bytes,
            "routes": stats.route_bytes,
            "scores": stats.score_bytes,
        },
        steps_total=engine.num_steps,
        features=engine.features,
        weight_version=engine.weights.version,
        state=stats.state,
        places=places,
        last_recovery=last_recovery,
    )


def refresh_gauges(metrics: Metrics, engine: Engine, stats: StoreStats) -> None:
    metrics.requests_waiting.set(engine.num_waiting)
    metrics.requests_running.set(engine.num_running)
    metrics.plan_fragments.set(engine.plans.num_fragments)
    metrics.plan_fragment_bytes.set(engine.plans.num_bytes)
    metrics.prefix_store_nodes.set(stats.num_nodes)
    metrics.set_state(stats.state)
    metrics.prefix_store_bytes.labels("kv").set(stats.kv_bytes)
    metrics.prefix_store_bytes.labels("routes").set(stats.route_bytes)
    metrics.prefix_store_bytes.labels("scores").set(stats.score_bytes)
    for rank, (free, used) in enumerate(
        zip(stats.kv_blocks_free, stats.kv_blocks_used, strict=True)
    ):
        metrics.kv_blocks_free.labels(rank).set(free)
        metrics.kv_blocks_used.labels(rank).set(used)
    metrics.set_evictions(
        {
            "kv": stats.kv_blocks_evicted,
            "routes": stats.route_blocks_evicted,
            "scores": stats.score_blocks_evicted,
        }
    )


def count_recovery(metrics: Metrics, recovered: Recovered) -> None:
    metrics.recovery_seconds.observe(recovered.seconds)
    metrics.recovered_requests.labels("rank").inc(recovered.lost.num_requests)
    metrics.recovered_tokens.labels("replayed").inc(recovered.lost.num_routed_tokens)
    metrics.recovered_tokens.labels("computed").inc(recovered.lost.num_unrouted_tokens)
