"""`pointsman bench plans`: what compiling, keeping and using plan fragments costs, for shapes of real models.

Routes are drawn at random, every expert equally likely: a token then visits many ranks, and plans are large.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from cluster.dispatch_plan import PlanFragment
from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes, expert_id_dtype
from cluster.types import Rank
from cluster.worker_messages import PlanPart
from expert_workers.device import cpu_device
from expert_workers.inputs_from_step import PlannedChunk
from expert_workers.model.numerics import FastNumerics
from expert_workers.plan_cache import PlanCache, PlanShape
from prefix_store.plan_compiler import compile_fragment

FRAGMENT_TOKENS = 128
STEP_FRAGMENTS = 4
"""A step of 512 tokens on one source rank."""
REPEATS = 9
_SEED = 0


@dataclass(frozen=True)
class Shape:
    name: str
    num_moe_layers: int
    num_experts: int
    num_experts_per_tok: int


SHAPES = (
    Shape("demo model", 4, 64, 4),
    Shape("DeepSeek-V3", 58, 256, 8),
)


def run(ep_size: int) -> list[dict[str, Any]]:
    """A row per shape; times are medians of one thread.

    compile_ms_per_1000_tokens  on the compiler's thread, of one source rank
    plan_ms_per_step_of_512     on every rank before layer 0, here the source: parts joined, tensors of all layers built
    """
    return [_measure(shape, ep_size) for shape in SHAPES]


def _measure(shape: Shape, ep_size: int) -> dict[str, Any]:
    placement = ExpertPlacement.contiguous(shape.num_experts, ep_size)
    routes = _random_routes(shape)
    fragment = compile_fragment(routes, Rank(0), placement, first_position=0)
    largest = max(part.num_bytes for part in fragment.receive)
    per_thousand = 1000 / FRAGMENT_TOKENS
    cache = _cache_of_source_rank(shape, placement, fragment)
    chunk = PlannedChunk(0, 0, STEP_FRAGMENTS * FRAGMENT_TOKENS, tuple(range(STEP_FRAGMENTS)))

    compile_seconds = _median_seconds(
        lambda: compile_fragment(routes, Rank(0), placement, first_position=0)
    )
    plan_seconds = _median_seconds(lambda: cache.plan_step(0, [chunk], has_dynamic=False))
    return {
        "shape": shape.name,
        "ep_size": ep_size,
        "repeats": REPEATS,
        "compile_ms_per_1000_tokens": round(1e3 * compile_seconds * per_thousand, 2),
        "plan_ms_per_step_of_512": round(1e3 * plan_seconds, 2),
        "bytes_all_ranks_per_1000_tokens": round(fragment.num_bytes * per_thousand),
        "bytes_source_rank_per_1000_tokens": round(
            (fragment.send.num_bytes + largest) * per_thousand
        ),
        "route_bytes_per_1000_tokens": round(routes.num_bytes * per_thousand),
    }


def _cache_of_source_rank(
    shape: Shape, placement: ExpertPlacement, fragment: PlanFragment
) -> PlanCache:
    """The fragment as often as a step has some."""
    plan_shape = PlanShape(
        rank=0,
        ep_size=placement.ep_size,
        placement_epoch=placement.epoch,
        num_layers=shape.num_moe_layers,
        num_experts=placement.num_physical_per_rank,
        num_experts_per_tok=shape.num_experts_per_tok,
        min_group_rows=FastNumerics.min_group_rows,
        device=cpu_device(),
    )
    cache = PlanCache(plan_shape, exchange=None)
    for fragment_id in range(STEP_FRAGMENTS):
        cache.add(
            PlanPart(
                fragment_id=fragment_id,
                digest=fragment.digest,
                source=fragment.source,
                placement_epoch=fragment.placement_epoch,
                num_tokens=fragment.num_tokens,
                send=fragment.send,
                receive=fragment.receive[0],
            )
        )
    return cache


def _random_routes(shape: Shape) -> ExpertRoutes:
    rng = np.random.default_rng(_SEED)
    draws = rng.random((FRAGMENT_TOKENS, shape.num_moe_layers, shape.num_experts))
    ids = np.sort(np.argsort(draws, axis=2)[..., : shape.num_experts_per_tok], axis=2)
    weights = rng.random(ids.shape).astype(np.float32)
    return ExpertRoutes(ids.astype(expert_id_dtype(shape.num_experts)), weights)


def _median_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return median(seconds)
