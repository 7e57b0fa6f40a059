"""`pointsman bench plans`: what compiling, keeping and joining plan fragments costs, for shapes of real models.

Routes are drawn at random, every expert equally likely: a token then visits many ranks, and plans are large.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from cluster.placement import ExpertPlacement
from cluster.routes import ExpertRoutes, expert_id_dtype
from cluster.types import Rank
from expert_workers.step_plan import PlacedReceive, PlacedSend, join_parts
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
    """A row per shape; times are medians of one thread, per 1,000 tokens of one source rank."""
    return [_measure(shape, ep_size) for shape in SHAPES]


def _measure(shape: Shape, ep_size: int) -> dict[str, Any]:
    placement = ExpertPlacement.contiguous(shape.num_experts, ep_size)
    routes = _random_routes(shape)
    fragment = compile_fragment(routes, Rank(0), placement, first_position=0)
    largest = max(part.num_bytes for part in fragment.receive)
    per_thousand = 1000 / FRAGMENT_TOKENS

    def join() -> None:
        join_parts(
            [PlacedSend(fragment.send, i * FRAGMENT_TOKENS) for i in range(STEP_FRAGMENTS)],
            [PlacedReceive(fragment.receive[0], 0) for _ in range(STEP_FRAGMENTS)],
            num_layers=shape.num_moe_layers,
            num_experts=placement.num_physical_per_rank,
            ep_size=ep_size,
        )

    compile_seconds = _median_seconds(
        lambda: compile_fragment(routes, Rank(0), placement, first_position=0)
    )
    return {
        "shape": shape.name,
        "ep_size": ep_size,
        "repeats": REPEATS,
        "compile_ms_per_1000_tokens": round(1e3 * compile_seconds * per_thousand, 2),
        "join_ms_per_step_of_512": round(1e3 * _median_seconds(join), 2),
        "bytes_all_ranks_per_1000_tokens": round(fragment.num_bytes * per_thousand),
        "bytes_source_rank_per_1000_tokens": round(
            (fragment.send.num_bytes + largest) * per_thousand
        ),
        "route_bytes_per_1000_tokens": round(routes.num_bytes * per_thousand),
    }


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
