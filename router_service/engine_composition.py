"""An engine put together from settings and from what the cell around it provides."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.config import Config
from cluster.routes import RouteShape
from cluster.types import StepId
from cluster.worker_messages import CellIdentity
from router_service.clients import PrefixStore
from router_service.engine import Engine
from router_service.engine_limits import FIRST_STEP, EngineLimits
from router_service.engine_parts import EngineParts
from router_service.features import Features
from router_service.fragment_pool import PlanCompiler
from router_service.plan_book import PlanBook
from router_service.plan_limits import plan_limits, plans_by_default
from router_service.scheduler import Scheduler
from router_service.scheduler_limits import SchedulerLimits
from router_service.served_weights import NamespaceOf, ServedWeights
from router_service.step_observer import StepObserver
from router_service.worker_client import WorkerClient


@dataclass(frozen=True)
class ServedShapes:
    """What an engine must know of its model."""

    vocab_size: int
    route_shape: RouteShape
    namespace_of: NamespaceOf


@dataclass(frozen=True)
class Surroundings:
    """What an engine works with and does not own."""

    store: PrefixStore
    compiler: PlanCompiler
    workers: WorkerClient
    observer: StepObserver
    draw_seed: Callable[[], int]


def compose_engine(
    config: Config,
    identity: CellIdentity,
    shapes: ServedShapes,
    around: Surroundings,
    first_step: StepId = FIRST_STEP,
) -> Engine:
    limits = SchedulerLimits.from_config(
        config.scheduler, num_ranks=identity.ep_size, block_size=identity.block_size
    )
    features = Features(
        route_replay=config.store.route_replay,
        planned_dispatch=plans_by_default(config.cell.dispatch, identity.ep_size),
    )
    plans = PlanBook(
        plan_limits(config, identity),
        features=features,
        compiler=around.compiler,
        channel=around.workers,
        observer=around.observer,
    )
    parts = EngineParts(
        scheduler=Scheduler(limits, around.store, features, plans),
        store=around.store,
        workers=around.workers,
        plans=plans,
        features=features,
        observer=around.observer,
    )
    return Engine(
        _engine_limits(config, identity, shapes, first_step),
        parts,
        weights=ServedWeights(identity.model_fingerprint, shapes.namespace_of),
        draw_seed=around.draw_seed,
    )


def _engine_limits(
    config: Config, identity: CellIdentity, shapes: ServedShapes, first_step: StepId
) -> EngineLimits:
    return EngineLimits(
        num_ranks=identity.ep_size,
        block_size=identity.block_size,
        num_kv_blocks=identity.num_kv_blocks,
        vocab_size=shapes.vocab_size,
        route_shape=shapes.route_shape,
        dispatch=identity.dispatch,
        placement_epoch=identity.placement_epoch,
        frame_timeout_seconds=config.cell.step_timeout_floor_seconds,
        first_step=first_step,
    )
